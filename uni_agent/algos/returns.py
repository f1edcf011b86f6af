"""Who is trained, which turn earned what, and what it is worth later: numpy, float64.

Chains: the trajectories of one episode that belong to the same agent form one chain, in their
order, because a tape that was restarted continues the tape before it. A chain's turns are counted
through; each agent's chain receives the episode's outcome on its last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from uni_agent.types import TRAINING_POLICY, Episode

Float64Array = npt.NDArray[np.float64]

TurnRewards = Callable[[Episode], list[list[float]]]
"""An episode -> the reward of each turn of each trajectory. Called for scored episodes only."""


def scored(episode: Episode) -> bool:
    """Whether the episode has a reward and counts in its group."""
    if TRAINING_POLICY[episode.end] in ("drop", "retry") or episode.reward is None:
        return False
    steps = [turn.reward for t in episode.trajectories for turn in t.turns if turn.reward is not None]
    return bool(np.isfinite(episode.reward) and np.isfinite(steps).all())


def trainable(episode: Episode) -> bool:
    """Whether the episode's tokens may train: scored, the engine's own, and ended by its own doing."""
    policy = TRAINING_POLICY[episode.end]
    return episode.trainable and policy in ("train", "bootstrap") and scored(episode)


def chains(episode: Episode) -> list[list[int]]:
    """The indices of the trajectories that follow each other, one list per agent."""
    by_agent: dict[str, list[int]] = {}
    for index, trajectory in enumerate(episode.trajectories):
        by_agent.setdefault(trajectory.agent, []).append(index)
    return list(by_agent.values())


def outcome_only(episode: Episode) -> list[list[float]]:
    """The episode's reward on the last turn of each agent; step rewards are ignored."""
    rewards = [[0.0] * len(trajectory.turns) for trajectory in episode.trajectories]
    for chain in chains(episode):
        played = [index for index in chain if rewards[index]]
        if played:
            rewards[played[-1]][-1] = float(episode.reward or 0.0)
    return rewards


def _steps(episode: Episode) -> list[list[float]]:
    return [[float(turn.reward or 0.0) for turn in t.turns] for t in episode.trajectories]


def outcome_or_turns(episode: Episode) -> list[list[float]]:
    """The turns' own rewards where any turn has one, else the episode's reward on the last turn.

    For worlds whose step rewards already hold the outcome; where they are shaping beside it, use
    `outcome_and_turns`.
    """
    if any(turn.reward is not None for t in episode.trajectories for turn in t.turns):
        return _steps(episode)
    return outcome_only(episode)


def outcome_and_turns(episode: Episode) -> list[list[float]]:
    """The turns' own rewards, and the episode's reward on top on the last turn of each agent."""
    return [
        [step + last for step, last in zip(steps, lasts, strict=True)]
        for steps, lasts in zip(_steps(episode), outcome_only(episode), strict=True)
    ]


def turn_returns(episode: Episode, rewards: TurnRewards, discount: float) -> list[Float64Array]:
    """The discounted sum of this and later turns' rewards, one array per trajectory.

    `discount` is per turn of the same agent, whatever the turns' lengths.
    """
    earned = rewards(episode)
    results = [np.zeros(len(turns)) for turns in earned]
    for chain in chains(episode):
        later = 0.0
        for index in reversed(chain):
            for turn in reversed(range(len(earned[index]))):
                later = earned[index][turn] + discount * later
                results[index][turn] = later
    return results


def centre(
    values: Sequence[float] | Float64Array, *, normalize_std: bool, size: float = 0.0
) -> Float64Array | None:
    """Subtract the mean and, if asked, divide by the unbiased deviation (n - 1).

    None when there is nothing to compare: fewer than two values, or all equal up to float noise.
    `size` is the largest magnitude of the values before a baseline was subtracted from them.
    """
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return None
    centred = array - array.mean()
    deviation = float(np.sqrt((centred**2).sum() / (len(array) - 1)))
    # Relative, so that small rewards are still rewards; wide enough for float32 noise.
    if deviation <= 1e-6 * max(size, float(np.abs(array).max())):
        return None
    return centred / deviation if normalize_std else centred


def discounted_sum(deltas: Float64Array, decay: Float64Array) -> Float64Array:
    """A[t] = deltas[t] + decay[t] * A[t + 1], along the columns of [N, T] arrays."""
    result = np.array(deltas, np.float64)
    for column in range(result.shape[1] - 2, -1, -1):
        result[:, column] += decay[:, column] * result[:, column + 1]
    return result
