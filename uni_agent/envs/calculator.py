"""The smallest multi-turn world, to be read as an example: compute an expression, with a tool or without."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence

from uni_agent.envs.tasks import TaskSet
from uni_agent.protocols import StepResult
from uni_agent.types import Message, Task, ToolResult

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TURN_COST = 0.1


def calculator(left: int, operation: str, right: int) -> str:
    """Compute one operation.

    Args:
        left: the first number
        operation: one of + - *
        right: the second number
    """
    return str(OPERATIONS[operation](left, right))


class CalculatorEnv:
    """Ask for the value of an expression; earn 1 for the right answer, lose 0.1 for each turn before.

    A turn that calls the tool goes on; a turn that does not is an answer, which ends the world. After
    `max_turns` turns without an answer the episode is cut short: truncated, not terminated.
    """

    def __init__(self, max_turns: int = 6) -> None:
        self._turns_left = max_turns
        self._value = 0

    @staticmethod
    def task(task_id: str) -> Task:
        """The task of any id: the id is the seed."""
        rng = random.Random(task_id)
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        prompt = f"What is {a} * {b} - {c}? Use the calculator, then answer with the number."
        return Task(task_id, (Message("user", prompt),), {"value": a * b - c})

    @staticmethod
    def tasks(split: str | None, num: int, seed: int = 0) -> TaskSet:
        """Any number of tasks."""
        return TaskSet(CalculatorEnv.task(f"{split or 'train'}-{seed}-{i}") for i in range(num))

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask."""
        self._value = int(task.data["value"])
        return task.prompt

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        """Judge an answer: its last number counts."""
        self._turns_left -= 1
        if tool_results:
            return StepResult(reward=-TURN_COST, truncated=self._turns_left == 0)
        numbers = re.findall(r"-?\d+", message.content)
        right = bool(numbers) and int(numbers[-1]) == self._value
        return StepResult(reward=float(right), terminated=True, metrics={"solved": float(right)})

    async def close(self) -> None:
        """Nothing is held."""
