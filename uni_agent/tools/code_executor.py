"""The `code_executor` tool: runs the model's Python in the sandbox, against the task's tests if it has any.

In: code, or an edit of one line of the task's program. Out: the score and the first failure, as text for
the model and as data for environment and rewards. The verdict is `sandbox.grade`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uni_agent.protocols import SandboxLimits, SandboxResult, ToolContext
from uni_agent.sandbox.grade import DEFAULT_LIMITS, TestReport, run_tests
from uni_agent.tools.arguments import Argument, Arguments, BadArguments
from uni_agent.tools.function import bad_arguments, cap_output
from uni_agent.types import ToolResult, ToolSpec

_NAME = "code_executor"
_SPARE_S = 60.0
"""Beyond a run's own limit: it may wait for a free place in the sandbox pool."""


class CodeExecutor:
    """Runs code. With `tests` in the task's data it reports how many pass and the first that fail.

    `line` replaces that line (from 1) of the program by `code`, which may be several lines, or empty to
    delete it; without `line`, `code` is the whole program. The program is `task.data["code"]` at first
    and then what the latest call made of it. Code that hangs, crashes or does not
    parse fails its tests; that is the model's doing, so `failure` stays "none".

    The episodes of a group often propose the same program. What the latest `remember` programs came to
    is answered again without a run (0 runs everything): tests are taken to be deterministic. Rewards
    run the final program themselves.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits = DEFAULT_LIMITS,
        max_failures: int = 1,
        output_bytes: int = 1 << 13,
        remember: int = 1 << 14,
    ) -> None:
        self._limits = limits
        self._remember = remember
        self._reports: dict[tuple[str, tuple[str, ...]], TestReport] = {}
        self._max_failures = max_failures
        self._output_bytes = output_bytes
        self._arguments = Arguments(
            [
                Argument(
                    "line", int | None, "The line to replace; without it, code is the whole program.", None
                ),
                Argument("code", str, "Python code."),
            ]
        )
        self.timeout_s = limits.timeout_s + _SPARE_S
        self.spec = ToolSpec(_NAME, "Run the tests on the code.", self._arguments.schema)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run; see the class. Raises SandboxError, TaskFileError."""
        try:
            values = self._arguments.validate(arguments)
            current = context.state.get(_NAME, context.task.data.get("code"))
            program = _program(current, values["code"], values["line"])
        except BadArguments as error:
            return bad_arguments(_NAME, str(error))
        context.state[_NAME] = program
        tests: Sequence[str] | None = context.task.data.get("tests")
        if not tests:
            result = await context.sandbox.run_python(program, limits=self._limits)
            return self._plain(program, result)
        report = await self._report(context, program, tests)
        return ToolResult(
            "",
            _NAME,
            cap_output(report.text(self._max_failures), self._output_bytes),
            data={
                "program": program,
                "passed": report.passed,
                "total": report.total,
                "parsed": report.parsed,
                "status": report.status,
            },
        )

    async def _report(self, context: ToolContext, program: str, tests: Sequence[str]) -> TestReport:
        key = (program, tuple(tests))
        known = self._reports.get(key)
        if known is not None:
            return known
        report = await run_tests(context.sandbox, program, tests, self._limits)
        # a time-out may be the machine's fault, and is tried again
        if report.status == "ok" and self._remember:
            if len(self._reports) >= self._remember:
                del self._reports[next(iter(self._reports))]
            self._reports[key] = report
        return report

    def _plain(self, program: str, result: SandboxResult) -> ToolResult:
        ended = (
            f"exit status {result.exit_code}" if result.exit_code is not None else f"killed: {result.status}"
        )
        parts = [ended]
        for name, text in (("stdout", result.stdout_text), ("stderr", result.stderr_text)):
            if text:
                parts.append(f"{name}:\n{cap_output(text.rstrip(), self._output_bytes // 2)}")
        return ToolResult(
            "",
            _NAME,
            "\n".join(parts),
            data={"program": program, "status": result.status, "exit_code": result.exit_code},
        )


def _program(current: object, code: str, line: int | None) -> str:
    """The program that a call means. Raises BadArguments."""
    if line is None:
        return code
    if not isinstance(current, str):
        raise BadArguments("line: this task has no program to edit; send the whole program as code")
    lines = current.split("\n")
    count = len(lines) - 1 if lines[-1] == "" else len(lines)
    if not 1 <= line <= count:
        raise BadArguments(f"line: the program has lines 1 to {count}, got {line}")
    # the edit may or may not end its last line; the program's own line ends stay
    lines[line - 1 : line] = code.removesuffix("\n").split("\n") if code else []
    return "\n".join(lines)
