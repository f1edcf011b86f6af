"""A world of your own: an environment, a tool, a reward. Change all three."""

from collections.abc import Sequence

from uni_agent.protocols import StepResult
from uni_agent.types import Episode, Message, Task, ToolResult


class MyEnv:
    """Repair a function: the episode ends when a run of code_executor passes all tests."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return task.prompt

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        runs = [result.data for result in tool_results if result.data.get("total")]
        solved = any(run["passed"] == run["total"] for run in runs)
        return StepResult(reward=float(solved), terminated=solved)

    async def close(self) -> None: ...


def python_version() -> str:
    """Say which Python the tests run under."""
    import platform

    return platform.python_version()


def solved_soon(episode: Episode) -> float:
    """1 for a repair at the first attempt, a tenth less for each one more, 0 for none."""
    solved = any(turn.reward for trajectory in episode.trajectories for turn in trajectory.turns)
    return 1.1 - 0.1 * episode.num_turns if solved else 0.0
