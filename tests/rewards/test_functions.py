"""Users' functions as rewards: what they may return, how they fail, and that they block nobody."""

import asyncio
import functools
import json
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from uni_agent.errors import RewardError, SandboxError, UsageError
from uni_agent.protocols import Reward, RewardContext, Sandbox, Scores
from uni_agent.rewards import reward_from_function, weighted
from uni_agent.types import Episode, Message, Sampling, Task, Trajectory, Turn, plain_number


def no_sandbox() -> Sandbox:
    raise AssertionError("this reward needs no sandbox")


CONTEXT = RewardContext(no_sandbox)


def make_episode(number: int = 0, num_turns: int = 0) -> Episode:
    turn = Turn((0, 0), (0, 0), (), Message("assistant"), "stop", Sampling())
    empty = np.zeros(0, np.int32)
    tape = Trajectory("main", empty, empty.astype(bool), empty.astype(np.float32), empty, (turn,) * num_turns)
    return Episode(f"t/{number}", Task("t", ()), (tape,), "done")


async def score(result: object) -> Scores:
    return await reward_from_function(lambda _: result, "mine")(make_episode(), CONTEXT)


# --- R01: what a function may return --------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(2), 2.0),
        (np.array(3.0), 3.0),
        (0, 0.0),
    ],
)
async def test_r01_number_likes_become_plain_floats(value: object, expected: float) -> None:
    scores = await score(value)
    assert scores.values == {"mine": expected}
    assert type(scores.values["mine"]) is float
    assert json.dumps(dict(scores.values)) == json.dumps({"mine": expected})
    assert scores.total == expected


async def test_r01_a_torch_scalar_becomes_a_plain_float() -> None:
    import torch

    torch.set_num_threads(1)
    assert (await score(torch.tensor(0.25))).values == {"mine": 0.25}
    with pytest.raises(RewardError, match="Tensor"):
        await score(torch.tensor([1.0]))


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        np.str_("1.0"),
        float("inf"),
        -np.inf,
        [1.0],
        (1.0,),
        np.ones((2, 2)),
        object(),
        1j,
        10**400,
        {},
        {3: 1.0},
    ],
)
async def test_r01_anything_else_is_an_error_that_names_function_and_episode(value: object) -> None:
    with pytest.raises(RewardError, match="reward 'mine' on episode t/0") as error:
        await score(value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [None, float("nan"), np.float32("nan"), {"a": 1.0, "b": None}, {"a": float("nan")}]
)
async def test_r01_none_and_nan_mean_not_scored(value: object) -> None:
    scores = await score(value)
    assert scores.invalid is not None
    assert "t/0" in scores.invalid
    assert scores.values == {}
    assert scores.total is None


async def test_r01_one_function_scores_one_episode_so_counts_always_match() -> None:
    """A function written for batches returns a list: an error, not a broadcast."""
    with pytest.raises(RewardError, match=r"list .*expected one number"):
        await score([0.0, 1.0, 0.0, 1.0])


async def test_a_dict_gives_named_scores() -> None:
    scores = await score({"right": True, "short": np.float32(0.25)})
    assert scores.values == {"right": 1.0, "short": 0.25}
    assert scores.total == 1.25
    with pytest.raises(RewardError, match="on episode t/0, value 'short', is str '3'"):
        await score({"right": 1, "short": "3"})


async def test_scores_are_held_to_the_same_rules() -> None:
    given = Scores({"a": True}, {"a": [np.float32(0.5), 0.5]})
    assert await score(given) == Scores({"a": 1.0}, {"a": [0.5, 0.5]})
    assert (await score(Scores(invalid="no answer key"))).invalid == "no answer key"
    assert (await score(Scores({"a": float("nan")}))).invalid
    assert (await score(Scores({"a": 1.0}, {"a": [float("nan")]}))).invalid
    with pytest.raises(RewardError, match="turns 'a'"):
        await score(Scores({"a": 1.0}, {"a": ["x"]}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RewardError, match="different lengths"):
        await score(Scores({"a": 1.0}, {"a": [1.0], "b": [1.0, 2.0]}))


def test_a_number_names_where_it_came_from() -> None:
    with pytest.raises(RewardError, match="here is str 'x'; expected one number"):
        plain_number("x", "here")


# --- R02, R03: functions that fail ----------------------------------------------------------------


async def test_r02_an_exception_is_an_error_of_that_episode_only() -> None:
    def fn(episode: Episode) -> float:
        number = int(episode.id[-1])
        if number == 1:
            raise ValueError("no such answer")
        return float(number != 2)

    reward = reward_from_function(fn, "mine")
    results = await asyncio.gather(
        *(reward(make_episode(i), CONTEXT) for i in range(4)), return_exceptions=True
    )
    assert [r.total if isinstance(r, Scores) else None for r in results] == [1.0, None, 0.0, 1.0]
    assert isinstance(results[1], RewardError)
    assert str(results[1]) == "reward 'mine' on episode t/1 raised ValueError: no such answer"
    assert isinstance(results[1].__cause__, ValueError)


async def test_r02_async_functions_fail_the_same_way() -> None:
    async def fn(episode: Episode) -> float:
        raise KeyError(episode.id)

    with pytest.raises(RewardError, match="raised KeyError: 't/0'"):
        await reward_from_function(fn, "mine")(make_episode(), CONTEXT)


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3)])
async def test_r02_exceptions_that_would_break_the_loop_are_errors_too(error: BaseException) -> None:
    def fn(_: Episode) -> float:
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}"):
        await asyncio.wait_for(reward_from_function(fn, "mine")(make_episode(), CONTEXT), 5)


async def test_c07_a_sandbox_failure_stays_a_sandbox_failure() -> None:
    def fn(_: Episode) -> float:
        raise SandboxError("no disk")

    with pytest.raises(SandboxError, match="no disk"):
        await reward_from_function(fn, "mine")(make_episode(), CONTEXT)


async def test_r03_code_that_needs_the_main_thread_fails_clearly_and_never_scores_0() -> None:
    def fn(_: Episode) -> float:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        return 1.0

    reward = reward_from_function(fn, "alarmed")
    results = await asyncio.gather(
        *(reward(make_episode(i), CONTEXT) for i in range(4)), return_exceptions=True
    )
    for number, result in enumerate(results):
        assert isinstance(result, RewardError)
        assert f"reward 'alarmed' on episode t/{number} raised ValueError: signal only works" in str(result)


# --- S06: nobody waits ----------------------------------------------------------------------------


async def longest_gap_while(work: Callable[[], "asyncio.Future[list[Scores]]"]) -> tuple[float, float]:
    gaps: list[float] = []

    async def heartbeat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.05)
            gaps.append(time.perf_counter() - before)

    beat = asyncio.create_task(heartbeat())
    began = time.perf_counter()
    await work()
    beat.cancel()
    return time.perf_counter() - began, max(gaps)


async def test_s06_a_slow_sync_reward_stalls_nobody() -> None:
    def fn(_: Episode) -> float:
        time.sleep(0.5)
        return 1.0

    reward = reward_from_function(fn, "slow")
    total_s, gap_s = await longest_gap_while(
        lambda: asyncio.gather(*(reward(make_episode(i), CONTEXT) for i in range(8)))
    )
    assert total_s < 1.5
    assert gap_s < 0.2


async def test_s06_a_reward_has_threads_of_its_own_however_few_cores_there_are() -> None:
    together = threading.Barrier(24)

    def fn(_: Episode) -> float:
        together.wait(timeout=5)  # raises unless all 24 run at the same time
        return 1.0

    reward = reward_from_function(fn, "meets")
    found = await asyncio.gather(*(reward(make_episode(i), CONTEXT) for i in range(24)))
    assert [scores.total for scores in found] == [1.0] * 24


async def test_async_functions_are_awaited_also_behind_other_callables() -> None:
    async def fn(episode: Episode, value: float = 1.0) -> float:
        await asyncio.sleep(0)
        return value

    class Judge:
        async def __call__(self, episode: Episode) -> float:
            return 3.0

    for made, expected in (
        (fn, 1.0),
        (functools.partial(fn, value=2.0), 2.0),
        (Judge(), 3.0),
        (lambda e: fn(e, 4.0), 4.0),
    ):
        assert (await reward_from_function(made, "mine")(make_episode(), CONTEXT)).total == expected


# --- several rewards ------------------------------------------------------------------------------


def constant(scores: Scores) -> Reward:
    async def reward(episode: Episode, context: RewardContext) -> Scores:
        return scores

    return reward


async def test_weighted_names_every_part_and_sums_with_weights() -> None:
    both = weighted(
        {"right": (constant(Scores({"x": 1.0, "y": 1.0})), 1.0), "long": (constant(Scores({"n": 4.0})), -0.1)}
    )
    scores = await both(make_episode(), CONTEXT)
    assert scores.values == {"right": 2.0, "long": 4.0, "reward": pytest.approx(1.6)}
    assert scores.total == pytest.approx(1.6)
    assert scores.turn_totals is None
    nested = weighted({"both": (both, 2.0)})
    assert (await nested(make_episode(), CONTEXT)).total == pytest.approx(3.2)


async def test_weighted_turns_sum_to_the_total() -> None:
    stepwise = constant(Scores({"p": 0.75}, {"p": [0.5, 0.0, 0.25]}))
    both = weighted({"progress": (stepwise, 2.0), "bonus": (constant(Scores({"b": 1.0})), 0.5)})
    scores = await both(make_episode(num_turns=3), CONTEXT)
    assert scores.turn_totals == [1.0, 0.0, 1.0]
    assert sum(scores.turn_totals) == scores.total == 2.0
    with pytest.raises(RewardError, match="'progress' gave 3 turn values to the 2 turns of episode t/0"):
        await both(make_episode(num_turns=2), CONTEXT)


async def test_one_invalid_part_makes_the_episode_invalid() -> None:
    both = weighted(
        {"a": (constant(Scores({"a": 1.0})), 1.0), "b": (constant(Scores(invalid="no key")), 0.0)}
    )
    assert (await both(make_episode(), CONTEXT)).invalid == "b: no key"
    empty = weighted({"a": (constant(Scores()), 1.0)})
    assert (await empty(make_episode(), CONTEXT)).total is None


def test_weighted_refuses_what_cannot_be_summed() -> None:
    part = constant(Scores({"a": 1.0}))
    for bad, says in (
        ({}, "at least one"),
        ({"reward": (part, 1.0)}, 'none named "reward"'),
        ({"a": (part, float("nan"))}, "is nan"),
    ):
        with pytest.raises(UsageError, match=says):
            weighted(bad)
