"""A world in which code is repaired: broken code goes out, runs of proposed code come in.

It never runs anything: the tool `code_executor` does, and reports `program`, `passed`, `total` and
`parsed` in `ToolResult.data`. The grade is a reward's business; what grading needs is the artifact
`solution.py`, the program that was proposed last.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from uni_agent.envs.tasks import Row, TaskSet, prompt_messages, row_field
from uni_agent.errors import EnvironmentFailure, TaskFileError, UnknownNameError
from uni_agent.protocols import StepResult
from uni_agent.sandbox.grade import check_tests
from uni_agent.types import Message, Task, ToolResult

EXECUTOR = "code_executor"
SOLUTION = "solution.py"
MAX_ATTEMPTS = 5
NUDGE = f"Nothing was run. Call {EXECUTOR} with your fix."


def repair_prompt(code: str) -> str:
    """What the agent is told: the code with line numbers. The tests show only where they fail."""
    lines = code.rstrip("\n").split("\n")
    return "Some tests of this function fail:" + "".join(f"\n{n}|{line}" for n, line in enumerate(lines, 1))


class CodeDebugEnv:
    """Repair code in at most `max_attempts` attempts.

    A task's data holds `code` and `tests`. An attempt is a run of `code_executor`, a call that was
    malformed or refused, or a turn that called nothing; calls of other tools are free. The episode
    is terminated when all tests pass, and when the attempts are used up: failing is how this world
    ends, not a limit from outside. There is no reward per turn; `rewards.code_test_progress` gives
    one.
    """

    def __init__(self, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._max_attempts = max_attempts
        self._attempts = 0
        self._last: Mapping[str, Any] = {}

    @classmethod
    def with_max_steps(cls, max_steps: int) -> CodeDebugEnv:
        """A world of as many attempts as the registered number of steps."""
        return cls(max_attempts=max_steps)

    @staticmethod
    def task_from_json(row: Row) -> Task:
        """Make a Task from `id`, `code`, `tests` (a text, or a list of asserts), maybe `prompt`.

        Other keys are kept in `Task.data`. Raises TaskFileError.
        """
        task_id, code = row_field(row, "id", str), row_field(row, "code", str)
        given = row.get("tests")
        given = cast("list[object]", given) if isinstance(given, list) else [row_field(row, "tests", str)]
        texts = [text for text in given if isinstance(text, str) and text.strip()]
        if not texts or len(texts) < len(given):
            raise TaskFileError(f"'tests' is {given!r:.60}; expected Python: a text, or a list of asserts")
        tests = [test for text in texts for test in _single_tests(text)]
        check_tests(tests, "'tests'")
        prompt = prompt_messages(row) if "prompt" in row else (Message("user", repair_prompt(code)),)
        data = {key: value for key, value in row.items() if key not in ("id", "prompt")}
        return Task(task_id, prompt, {**data, "tests": tests})

    @staticmethod
    def tasks(split: str | None, num: int, seed: int = 0) -> TaskSet:
        """Generate tasks with ids "split-seed-number"; "test" means "held_out", None means "train"."""
        name = {None: "train", "test": "held_out"}.get(split, split)
        _check_split(str(name))
        return TaskSet(_generated(str(name), seed).first(num))

    @staticmethod
    def task(task_id: str) -> Task:
        """Generate the task of that id, such as "train-0-17". Raises UnknownNameError."""
        found = re.fullmatch(r"(\w+)-(\d{1,9})-(\d{1,6})", task_id)
        if found is None:
            raise UnknownNameError("code-repair task", task_id, ["train-0-0", "held_out-0-0"])
        split, seed, number = found[1], int(found[2]), int(found[3])
        _check_split(split)
        return _generated(split, seed).first(number + 1)[number]

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Show the broken code. Raises EnvironmentFailure for a task without code or tests."""
        code, tests = task.data.get("code"), task.data.get("tests")
        if not code or not tests or isinstance(tests, str):
            raise EnvironmentFailure(
                f"task {task.id!r} needs 'code' (a text) and 'tests' (a list of asserts) in its data; make "
                "tasks with CodeDebugEnv.task_from_json"
            )
        return task.prompt or (Message("user", repair_prompt(str(code))),)

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        """Look at the runs of this turn, in order, until one passes or the attempts are used up."""
        tried = [r for r in tool_results if r.name == EXECUTOR or r.error_kind]
        tried = [r for r in tried if r.error_kind != "not_executed"]
        solved = False
        for result in tried[: self._max_attempts - self._attempts]:
            self._attempts += 1
            if "passed" in result.data:
                self._last = result.data
                solved = _passes(result.data)
            if solved:
                break
        if not tool_results:
            self._attempts += 1
        over = solved or self._attempts >= self._max_attempts
        return StepResult(
            messages=() if over or tool_results else (Message("user", NUDGE),),
            terminated=over,
            artifacts={SOLUTION: str(self._last["program"]).encode("utf-8", "replace")} if self._last else {},
            metrics={
                "attempts": self._attempts,
                "solved": float(solved),
                "first_attempt_solved": float(solved and self._attempts == 1),
                "passed": int(self._last.get("passed", 0)),
                "total": int(self._last.get("total", 0)),
            },
        )

    async def close(self) -> None:
        """Nothing is held."""


def _single_tests(text: str) -> list[str]:
    """Part a text of several asserts, so that each one counts; any other text is one test."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return [text]
    parts = len(body) > 1 and all(isinstance(statement, ast.Assert) for statement in body)
    return [ast.unparse(statement) for statement in body] if parts else [text]


def _passes(run: Mapping[str, Any]) -> bool:
    return 0 < int(run["total"]) <= int(run["passed"])


def _check_split(split: str) -> None:
    from uni_agent.envs.repair_tasks import SPLITS

    if split not in SPLITS:
        raise UnknownNameError("split of the generated code-repair tasks", split, [*SPLITS, "test"])


class _Generated:
    """The tasks of one (split, seed), generated once and as far as they were asked for."""

    def __init__(self, split: str, seed: int) -> None:
        from uni_agent.envs.repair_tasks import stream_tasks

        self._rows = stream_tasks(seed=seed, split=split)
        self._tasks: list[Task] = []

    def first(self, num: int) -> list[Task]:
        missing = max(0, num - len(self._tasks))
        self._tasks += [CodeDebugEnv.task_from_json(row) for row in itertools.islice(self._rows, missing)]
        return self._tasks[:num]


@functools.lru_cache(maxsize=16)
def _generated(split: str, seed: int) -> _Generated:
    return _Generated(split, seed)
