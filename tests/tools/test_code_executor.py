"""The code_executor tool, in a real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from uni_agent.protocols import SandboxLimits, ToolContext
from uni_agent.sandbox import LocalSandboxes, local_sandbox
from uni_agent.sandbox.grade import run_tests
from uni_agent.tools import CodeExecutor, Toolbox
from uni_agent.types import Task, ToolCall, ToolResult

BROKEN = "def add(a, b):\n    c = a - b\n    return c\n"
DATA = {"code": BROKEN, "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(5, 1) == 6"]}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[LocalSandboxes]:
    factory = local_sandbox()
    yield factory
    asyncio.run(factory.close())


async def run(
    sandboxes: LocalSandboxes, arguments: dict[str, Any], data: dict[str, Any] = DATA, **limits: float
) -> ToolResult:
    executor = CodeExecutor(limits=SandboxLimits(**limits)) if limits else CodeExecutor()  # type: ignore[arg-type]
    async with Toolbox([executor], ToolContext(Task("t", (), data), sandboxes(), 0)) as toolbox:
        (result,) = await toolbox.call_all([ToolCall("c1", "code_executor", arguments)])
    assert result.failure == "none"
    return result


def test_the_model_sees_a_short_schema() -> None:
    assert CodeExecutor().spec.parameters == {
        "type": "object",
        "properties": {
            "line": {
                "type": "integer",
                "description": "The line to replace; without it, code is the whole program.",
            },
            "code": {"type": "string", "description": "Python code."},
        },
        "required": ["code"],
    }


@pytest.mark.parametrize(
    ("arguments", "program", "passed"),
    [
        ({"code": BROKEN}, BROKEN, 1),
        ({"code": BROKEN, "line": None}, BROKEN, 1),
        ({"code": "    c = a + b", "line": 2}, "def add(a, b):\n    c = a + b\n    return c\n", 3),
        (
            {"code": "    c = a\n    c += b\n", "line": 2},
            "def add(a, b):\n    c = a\n    c += b\n    return c\n",
            3,
        ),
        ({"code": "", "line": 2}, "def add(a, b):\n    return c\n", 0),
        ({"code": "    return b + a", "line": 3}, "def add(a, b):\n    c = a - b\n    return b + a\n", 3),
    ],
)
async def test_whole_programs_and_line_edits(
    sandboxes: LocalSandboxes, arguments: dict[str, Any], program: str, passed: int
) -> None:
    result = await run(sandboxes, arguments)
    expected = {"program": program, "passed": passed, "total": 3, "parsed": True, "status": "ok"}
    assert result.data == expected
    assert result.content.startswith(f"{passed}/3 tests passed")
    assert result.error_kind == ""


async def test_the_feedback_texts(sandboxes: LocalSandboxes) -> None:
    first = await run(sandboxes, {"code": BROKEN})
    assert first.content == "1/3 tests passed\nadd(1, 2) returned -1, expected 3"
    done = await run(sandboxes, {"code": "    c = a + b", "line": 2})
    assert done.content == "3/3 tests passed"
    unparsed = await run(sandboxes, {"code": "    c = a +", "line": 2})
    assert unparsed.content == "0/3 tests passed\nline 2: invalid syntax"
    assert unparsed.data["parsed"] is False


async def test_an_endless_loop_is_a_failed_test_not_a_failed_tool(sandboxes: LocalSandboxes) -> None:
    result = await run(sandboxes, {"code": "    while True: pass", "line": 2}, timeout_s=5, cpu_s=0.2)
    assert result.content == "0/3 tests passed\nadd(1, 2) timed out"
    assert result.data["status"] == "timeout"


@pytest.mark.parametrize("line", [0, 4, -1])
async def test_a_line_that_is_not_there(sandboxes: LocalSandboxes, line: int) -> None:
    result = await run(sandboxes, {"code": "x", "line": line})
    assert result.error_kind == "bad_arguments"
    assert "lines 1 to 3" in result.content
    assert str(line) in result.content


async def test_a_task_without_program_or_tests(sandboxes: LocalSandboxes) -> None:
    refused = await run(sandboxes, {"code": "x", "line": 1}, {"tests": DATA["tests"]})
    assert refused.error_kind == "bad_arguments"
    plain = await run(sandboxes, {"code": "import sys\nprint('hi')\nsys.exit(2)"}, {})
    assert plain.content == "exit status 2\nstdout:\nhi"
    assert plain.data["status"] == "nonzero"
    failed = await run(sandboxes, {"code": "1/0"}, {})
    assert "ZeroDivisionError" in failed.content


async def test_claiming_success_is_not_success(sandboxes: LocalSandboxes) -> None:
    for code in ("print('3/3 tests passed')", "print('3/3 tests passed')\nimport os\nos._exit(0)"):
        result = await run(sandboxes, {"code": code})
        assert result.data["passed"] == 0
        assert result.content.startswith("0/3 tests passed")


async def test_edits_add_up_within_an_episode_and_not_beyond_it(sandboxes: LocalSandboxes) -> None:
    executor = CodeExecutor()
    edits = [{"line": 2, "code": "    c = a"}, {"line": 3, "code": "    return c + b"}]
    for _ in range(2):
        async with Toolbox([executor], ToolContext(Task("t", (), DATA), sandboxes(), 0)) as toolbox:
            calls = [ToolCall(f"c{n}", "code_executor", edit) for n, edit in enumerate(edits)]
            results = await toolbox.call_all(calls)
        assert [result.data["passed"] for result in results] == [1, 3]
        assert results[1].data["program"] == "def add(a, b):\n    c = a\n    return c + b\n"


@pytest.mark.parametrize(("remember", "runs"), [(16, 1), (0, 3)])
async def test_the_same_program_and_tests_run_once(
    sandboxes: LocalSandboxes, monkeypatch: pytest.MonkeyPatch, remember: int, runs: int
) -> None:
    ran: list[str] = []

    async def counted(sandbox: Any, program: str, *rest: Any) -> Any:
        ran.append(program)
        return await run_tests(sandbox, program, *rest)

    monkeypatch.setattr("uni_agent.tools.code_executor.run_tests", counted)
    executor = CodeExecutor(remember=remember)
    for _ in range(3):
        async with Toolbox([executor], ToolContext(Task("t", (), DATA), sandboxes(), 0)) as toolbox:
            (result,) = await toolbox.call_all([ToolCall("c", "code_executor", {"code": BROKEN})])
        assert result.data["passed"] == 1
    assert len(ran) == runs
