"""A world of one's own in 20 lines: an environment, a tool, a reward. `README.md` shows this file."""

from uni_agent.protocols import StepResult
from uni_agent.types import Episode, Message, Task


class GuessEnv:
    """Guess a hidden number; the tool says whether the guess was too low or too high."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self.secret = task.data["secret"]
        return task.prompt

    async def step(self, message: Message, tool_results) -> StepResult:
        found = any(result.content == str(self.secret) for result in tool_results)
        return StepResult(reward=float(found), terminated=found)

    async def close(self) -> None: ...


def double(number: int) -> int:
    """Double a number.

    Args:
        number: what to double.
    """
    return 2 * number


def fewer_turns(episode: Episode) -> float:
    """1 when the number was found, less a tenth per turn."""
    found = sum(turn.reward or 0.0 for turn in episode.trajectories[0].turns)
    return found - 0.1 * episode.num_turns
