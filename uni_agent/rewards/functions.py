"""A user's plain function becomes a reward; several rewards become one.

What a function returns is checked here, at the border: a number or None goes on, everything else is
an error that names the function and the episode. No score is ever made up: a function that fails is
an error, not a 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from uni_agent.errors import RewardError, UniAgentError, UsageError
from uni_agent.protocols import Reward, RewardContext, Scores
from uni_agent.types import Episode, plain_number

RewardFunction = Callable[[Episode], object]
"""fn(episode) -> a number, a dict of named numbers, Scores, None (not scored), or one of these awaited."""

_THREADS_PER_REWARD = 32


def reward_from_function(fn: RewardFunction, name: str) -> Reward:
    """Turn `fn(episode)` into a Reward whose value is called `name`.

    An async function is awaited; any other runs in a thread, so that it never holds up other
    episodes. `fn` returns a number (bool, int, float, a numpy or torch scalar), a dict of named
    numbers whose sum is the reward, or Scores. None and NaN mean: not scored. Raises RewardError,
    naming the function and the episode, when `fn` raises or returns anything else; code that needs
    the main thread (signal.alarm, say) fails that way too, and never as a score of 0.
    """
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
    threads = ThreadPoolExecutor(_THREADS_PER_REWARD, thread_name_prefix=f"reward-{name}")

    async def reward(episode: Episode, context: RewardContext) -> Scores:
        where = f"reward {name!r} on episode {episode.id}"
        try:
            if is_async:
                result = await cast("Awaitable[object]", fn(episode))
            else:
                result = await asyncio.get_running_loop().run_in_executor(threads, _call, fn, episode, where)
                if inspect.isawaitable(result):
                    result = await result
        except UniAgentError:
            raise
        except Exception as error:
            raise _failure(where, error) from error
        return scores_from(result, name, where)

    return reward


def _call(fn: RewardFunction, episode: Episode, where: str) -> object:
    """Call in a thread. StopIteration and SystemExit would break the loop that waits for the thread."""
    try:
        return fn(episode)
    except (StopIteration, SystemExit) as error:
        raise _failure(where, error) from error


def _failure(where: str, error: BaseException) -> RewardError:
    return RewardError(f"{where} raised {type(error).__name__}: {error}")


def scores_from(result: object, name: str, where: str) -> Scores:
    """Check what a reward function returned. Raises RewardError, starting with `where`."""
    if isinstance(result, Scores):
        return _checked(result, where)
    if not isinstance(result, Mapping):
        result = {name: result}
    elif not result:
        raise RewardError(f"{where} returned an empty dict; return named numbers, or None for not scored")
    values: dict[str, float] = {}
    for key, raw in cast("Mapping[object, object]", result).items():
        if not isinstance(key, str):
            raise RewardError(f"{where} returned a value named {key!r}; names must be text")
        number = plain_number(raw, where if key == name else f"{where}, value {key!r},")
        if number is None:
            return Scores(invalid=f"{where} gave {'NaN' if raw is not None else 'None'} for {key!r}")
        values[key] = number
    return Scores(values)


def _checked(scores: Scores, where: str) -> Scores:
    """Hold Scores to the same rules as plain numbers."""
    if scores.invalid is not None:
        return scores
    values = scores_from(scores.values, "", where) if scores.values else scores
    if values.invalid is not None:
        return values
    turns: dict[str, list[float]] = {}
    for key, sequence in scores.turns.items():
        numbers = [plain_number(raw, f"{where}, turns {key!r},") for raw in sequence]
        turns[key] = [number for number in numbers if number is not None]
        if len(turns[key]) < len(numbers):
            return Scores(invalid=f"{where} gave None or NaN for a turn in {key!r}")
    if len({len(sequence) for sequence in turns.values()}) > 1:
        raise RewardError(f"{where} returned turns of different lengths; give each name one value per turn")
    return Scores(values.values, turns)


def weighted(rewards: Mapping[str, tuple[Reward, float]]) -> Reward:
    """Combine named rewards: {"tests": (code_test_pass_rate, 1.0), "short": (shortness, 0.1)}.

    The Scores hold each reward's total, unweighted, under its name, and the weighted sum under
    "reward", which is what counts (see `Scores.total`). When any reward is given per turn, so is the
    sum: a reward without turns is then earned on the last one. One invalid reward makes the episode
    invalid. Raises UsageError for no rewards, a name "reward", and a weight that is not finite.
    """
    if not rewards or "reward" in rewards:
        raise UsageError('weighted() needs at least one reward, and none named "reward" (that is the sum)')
    for name, (_, weight) in rewards.items():
        if not math.isfinite(weight):
            raise UsageError(f"the weight of reward {name!r} is {weight}; expected a finite number")

    async def reward(episode: Episode, context: RewardContext) -> Scores:
        values: dict[str, float] = {}
        turns: dict[str, list[float]] = {}
        for name, (part, _) in rewards.items():
            scores = await part(episode, context)
            total = scores.total
            if total is None:
                return Scores(invalid=f"{name}: {scores.invalid or 'the reward gave no values'}")
            values[name] = total
            if scores.turn_totals is not None:
                turns[name] = list(scores.turn_totals)
                if len(turns[name]) != episode.num_turns:
                    raise RewardError(
                        f"reward {name!r} gave {len(turns[name])} turn values to the "
                        f"{episode.num_turns} turns of episode {episode.id}; give one value per turn"
                    )
        summed = sum(rewards[name][1] * value for name, value in values.items())
        if turns and episode.num_turns:
            by_turn = [0.0] * episode.num_turns
            for name, value in values.items():
                earned = turns.get(name, [0.0] * (episode.num_turns - 1) + [value])
                by_turn = [sum_ + rewards[name][1] * one for sum_, one in zip(by_turn, earned, strict=True)]
            turns["reward"] = by_turn
        return Scores({**values, "reward": summed}, turns)

    return reward
