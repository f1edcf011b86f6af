"""Grade repaired code by its tests, in a sandbox that the agent never touched.

The agent's own world is closed by then: what it left is the artifact `solution.py`. The numbers that
the agent saw while it worked are not trusted here; they serve the shaping reward only.
"""

from __future__ import annotations

from collections.abc import Sequence

from uni_agent.errors import RewardError
from uni_agent.protocols import RewardContext, SandboxLimits, Scores
from uni_agent.sandbox.grade import DEFAULT_LIMITS, run_tests
from uni_agent.types import Episode

SOLUTION = "solution.py"
EXECUTOR = "code_executor"
PARSE_CREDIT = 0.1


async def code_test_pass_rate(
    episode: Episode,
    context: RewardContext,
    *,
    parse_credit: float = PARSE_CREDIT,
    limits: SandboxLimits = DEFAULT_LIMITS,
) -> Scores:
    """Run the task's tests on `solution.py` in a fresh sandbox; the reward is the share that passes.

    Code that parses earns `parse_credit` at least; an episode that proposed nothing earns 0. Raises
    SandboxError when the sandbox itself fails (the episode is then invalid: no score is made up), and
    RewardError when the task has no tests.
    """
    tests: Sequence[str] = episode.task.data.get("tests") or ()
    if not tests or isinstance(tests, str):
        raise RewardError(
            f"reward 'code_test_pass_rate' on episode {episode.id}: task {episode.task.id!r} has no list "
            "of 'tests' in its data; grade tasks of the code environment, or use another reward"
        )
    program = episode.artifacts.get(SOLUTION)
    if program is None:
        return Scores({"code_test_pass_rate": 0.0})
    async with context.sandbox() as sandbox:
        report = await run_tests(sandbox, program.decode("utf-8", "replace"), tests, limits)
    value = _credit(report.passed, report.total, report.parsed, parse_credit)
    return Scores({"code_test_pass_rate": value})


async def code_test_progress(
    episode: Episode, context: RewardContext, *, parse_credit: float = PARSE_CREDIT
) -> Scores:
    """Reward each turn with what it added to the best pass rate so far: step-wise, never negative.

    The turns' rewards sum to the best rate that the agent reached, which is the value. They come from
    the runs of the episode itself.
    """
    best = 0.0
    gains: list[float] = []
    for turn in (turn for trajectory in episode.trajectories for turn in trajectory.turns):
        before = best
        for result in turn.tool_results:
            if result.name == EXECUTOR and "passed" in result.data:
                run = result.data
                best = max(best, _credit(run["passed"], run["total"], run["parsed"], parse_credit))
        gains.append(best - before)
    return Scores({"code_test_progress": best}, {"code_test_progress": gains})


def _credit(passed: int, total: int, parsed: bool, parse_credit: float) -> float:
    return max(passed / total if total else 0.0, parse_credit if parsed else 0.0)
