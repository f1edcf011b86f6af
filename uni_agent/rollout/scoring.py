"""From what a reward said to an Episode's rewards: step rewards, and what is not a number.

An Episode that was played goes in, the same Episode with its rewards goes out. None is never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from uni_agent.errors import EngineError, RewardError, SandboxError
from uni_agent.protocols import Reward, RewardContext, Scores
from uni_agent.types import EndReason, Episode, plain_number


def finite(value: object, what: str) -> float:
    """As `plain_number`, but None and NaN are refused as well. Raises RewardError."""
    plain = plain_number(value, what)
    if plain is None:
        raise RewardError(f"{what} is {value!r}; expected a finite number")
    return plain


def end_of_failure(error: BaseException) -> EndReason:
    """How an episode ends whose reward raised: what broke beneath it is retried, its own fault is not."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, SandboxError):
        return "sandbox_error"
    return "engine_error" if isinstance(error, EngineError) else "reward_error"


async def score(episode: Episode, reward: Reward | None, context: RewardContext) -> Episode:
    """Ask the reward and write its scores into the episode.

    The reward is `Scores.total`; `Scores.turn_totals`, where given, replace the environment's step
    rewards. Without a reward function the step rewards are summed under the name "env".

    Raises RewardError for values that are not numbers, and whatever the reward raises.
    """
    if reward is None:
        return _environment_score(episode)
    scores = await reward(episode, context)
    if scores.invalid is not None:
        return replace(episode, reward_reason=scores.invalid)
    named: dict[str, float] = {}
    for name, value in scores.values.items():
        plain = plain_number(value, f"score {name!r} of episode {episode.id}")
        if plain is None:
            return replace(episode, reward_reason=f"score {name!r} is {value}, not a number")
        named[name] = plain
    steps = {name: _step_values(episode, name, values) for name, values in scores.turns.items()}
    checked = Scores(named, steps)
    if checked.total is None:
        return replace(episode, reward_reason="the reward gave no value for the episode")
    episode = replace(episode, rewards=named, reward=checked.total, reward_reason=None)
    return episode if checked.turn_totals is None else _with_step_rewards(episode, checked.turn_totals)


def _environment_score(episode: Episode) -> Episode:
    given = [
        turn.reward
        for trajectory in episode.trajectories
        for turn in trajectory.turns
        if turn.reward is not None
    ]
    if not given:
        return replace(episode, reward_reason="no reward function, and the environment gave no step reward")
    total = float(sum(given))
    return replace(episode, rewards={"env": total}, reward=total)


def _step_values(episode: Episode, name: str, values: Sequence[float]) -> list[float]:
    if len(values) != episode.num_turns:
        raise RewardError(
            f"score {name!r} has {len(values)} step values for {episode.num_turns} turns of episode "
            f"{episode.id}; the reward must return one per turn"
        )
    what = f"step value {name!r} of episode {episode.id}"
    return [finite(value, what) for value in values]


def _with_step_rewards(episode: Episode, totals: Sequence[float]) -> Episode:
    rest = iter(totals)
    trajectories = tuple(
        replace(trajectory, turns=tuple(replace(turn, reward=next(rest)) for turn in trajectory.turns))
        for trajectory in episode.trajectories
    )
    return replace(episode, trajectories=trajectories)
