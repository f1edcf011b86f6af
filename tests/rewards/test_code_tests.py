"""Grading repaired code: pass rates, partial credit, and failures that are nobody's 0."""

import functools
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from uni_agent.errors import RewardError, SandboxError
from uni_agent.protocols import RewardContext, Sandbox
from uni_agent.rewards import code_test_pass_rate, code_test_progress
from uni_agent.sandbox import local_sandbox
from uni_agent.types import Episode, Message, Sampling, Task, ToolResult, Trajectory, Turn

TESTS = ["assert add(2, 3) == 5", "assert add(0, 0) == 0", "assert add(-1, 1) == 0", "assert add(1, 1) == 2"]
GOOD = "def add(a, b):\n    return a + b\n"


def make_episode(program: str | None, tests: Sequence[str] = TESTS, turns: Sequence[Turn] = ()) -> Episode:
    empty = np.zeros(0, np.int32)
    tape = Trajectory("main", empty, empty.astype(bool), empty.astype(np.float32), empty, tuple(turns))
    artifacts = {} if program is None else {"solution.py": program.encode()}
    return Episode("t/0", Task("t", (), {"tests": list(tests)}), (tape,), "done", artifacts=artifacts)


@pytest.fixture
async def context() -> AsyncIterator[RewardContext]:
    async with local_sandbox() as sandboxes:
        yield RewardContext(sandboxes)


def no_sandbox() -> Sandbox:
    raise AssertionError("nothing is to be run")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (GOOD, 1.0),
        ("def add(a, b):\n    return a * b\n", 0.25),
        ("def add(a, b):\n    return 7\n", 0.1),
        ("def add(a, b)\n    return a + b\n", 0.0),
        ("def add(a, b):\n    raise SystemExit(0)\n", 0.1),
        ("import os\nos._exit(0)\n", 0.1),
        ("def add(a, b):\n    while True: pass\n", 0.1),
    ],
)
async def test_a6_the_share_of_passing_tests_with_credit_for_code_that_parses(
    context: RewardContext, program: str, expected: float
) -> None:
    scores = await code_test_pass_rate(make_episode(program), context)
    assert scores.values == {"code_test_pass_rate": pytest.approx(expected)}
    assert scores.total == pytest.approx(expected)


async def test_the_credit_is_a_parameter_and_never_lowers_a_score(context: RewardContext) -> None:
    no_credit = functools.partial(code_test_pass_rate, parse_credit=0.0)
    assert (await no_credit(make_episode("def add(a, b): return 7"), context)).total == 0.0
    much = functools.partial(code_test_pass_rate, parse_credit=0.5)
    assert (await much(make_episode("def add(a, b): return a * b"), context)).total == 0.5
    assert (await much(make_episode(GOOD), context)).total == 1.0


async def test_an_episode_that_proposed_nothing_earns_0_without_a_run() -> None:
    assert (await code_test_pass_rate(make_episode(None), RewardContext(no_sandbox))).total == 0.0


async def test_c07_a_sandbox_that_fails_is_never_a_0() -> None:
    def broken() -> Sandbox:
        raise SandboxError("no disk")

    with pytest.raises(SandboxError, match="no disk"):
        await code_test_pass_rate(make_episode(GOOD), RewardContext(broken))


async def test_a_task_without_tests_cannot_be_graded() -> None:
    with pytest.raises(RewardError, match="on episode t/0: task 't' has no list of 'tests'"):
        await code_test_pass_rate(make_episode(GOOD, tests=()), RewardContext(no_sandbox))


# --- step by step ---------------------------------------------------------------------------------


def a_turn(*passed: int, parsed: bool = True) -> Turn:
    results = tuple(
        ToolResult("c", "code_executor", "", data={"program": "p", "passed": p, "total": 4, "parsed": parsed})
        for p in passed
    )
    return Turn((0, 0), (0, 0), (), Message("assistant"), "stop", Sampling(), results)


async def test_a7_progress_pays_each_turn_for_what_it_added() -> None:
    turns = [a_turn(), a_turn(0, parsed=False), a_turn(0), a_turn(2), a_turn(1), a_turn(3, 4)]
    scores = await code_test_progress(make_episode(GOOD, turns=turns), RewardContext(no_sandbox))
    assert scores.turns == {"code_test_progress": pytest.approx([0.0, 0.0, 0.1, 0.4, 0.0, 0.5])}
    assert scores.total == 1.0 == pytest.approx(sum(scores.turn_totals or ()))


async def test_progress_ignores_calls_that_did_not_run() -> None:
    refused = ToolResult("c", "code_executor", "no such argument", error_kind="bad_arguments")
    turn = Turn((0, 0), (0, 0), (), Message("assistant"), "stop", Sampling(), (refused,))
    scores = await code_test_progress(make_episode(None, turns=[turn]), RewardContext(no_sandbox))
    assert (scores.total, scores.turn_totals) == (0.0, [0.0])


async def test_progress_is_not_paid_for_what_another_tool_claims() -> None:
    claims = ToolResult("c", "linter", "", data={"passed": 4, "total": 4, "parsed": True})
    turn = Turn((0, 0), (0, 0), (), Message("assistant"), "stop", Sampling(), (claims,))
    scores = await code_test_progress(make_episode(None, turns=[turn]), RewardContext(no_sandbox))
    assert (scores.total, scores.turn_totals) == (0.0, [0.0])
