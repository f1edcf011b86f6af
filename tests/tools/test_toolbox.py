"""Tools from functions, and the toolbox: right calls run, wrong calls are answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import pytest

from uni_agent.errors import SandboxError, UsageError
from uni_agent.protocols import SandboxLimits, SandboxResult, Tool, ToolContext
from uni_agent.tools import ExpectedFailure, Toolbox, cap_output, tool
from uni_agent.types import Task, ToolCall, ToolResult


@dataclass
class CountingSandbox:
    """A sandbox that only records what is done with it."""

    events: list[str] = field(default_factory=list[str])
    broken: bool = False

    async def __aenter__(self) -> CountingSandbox:
        self.events.append("open")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.events.append("close")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        raise NotImplementedError

    async def run_python(
        self, code: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> SandboxResult:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        if self.broken:
            raise SandboxError("the sandbox is gone")
        self.events.append(f"read {path}")
        return b"content"

    async def write(self, path: str, content: bytes) -> None:
        raise NotImplementedError


def context(sandbox: CountingSandbox | None = None) -> ToolContext:
    return ToolContext(Task("t", ()), sandbox or CountingSandbox(), seed=1)


def call(name: str, arguments: Any, call_id: str = "c1", error: str | None = None) -> ToolCall:
    return ToolCall(call_id, name, cast(Mapping[str, Any], arguments), error=error)


RAN: list[tuple[object, object]] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second,
            on two lines
    """
    RAN.append((a, b))
    return a + b


async def answer(
    tools: Sequence[Tool], *calls: ToolCall, max_calls_per_turn: int = 8
) -> tuple[ToolResult, ...]:
    RAN.clear()
    async with Toolbox(tools, context(), max_calls_per_turn=max_calls_per_turn) as toolbox:
        return await toolbox.call_all(calls)


def test_a_function_becomes_a_schema() -> None:
    assert add.spec.name == "add"
    assert add.spec.description == "Add two numbers."
    assert add.spec.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first number"},
            "b": {"type": "integer", "description": "the second, on two lines"},
        },
        "required": ["a", "b"],
    }
    assert add(1, 2) == 3


async def test_rich_types_defaults_and_context() -> None:
    @tool(name="look_up", timeout_s=1)
    async def find(
        context: ToolContext,
        title: str,
        mode: Literal["fast", "full"] = "fast",
        pair: tuple[int, float] | None = None,
    ) -> dict[str, object]:
        """Find something."""
        return {"task": context.task.id, "title": title, "mode": mode, "pair": pair}

    properties = find.spec.parameters["properties"]
    assert list(properties) == ["title", "mode", "pair"]
    assert properties["title"] == {"type": "string"}
    assert properties["mode"]["enum"] == ["fast", "full"]
    assert properties["pair"]["type"] == "array"
    assert find.spec.parameters["required"] == ["title"]
    (result,) = await answer([find], call("look_up", {"title": "é", "pair": [1, 2]}))
    assert json.loads(result.content) == {"task": "t", "title": "é", "mode": "fast", "pair": [1, 2.0]}
    assert "é" in result.content
    (wrong,) = await answer([find], call("look_up", {"title": "x", "mode": "slow"}))
    assert wrong.error_kind == "bad_arguments"
    assert "mode" in wrong.content


def test_a_tool_that_cannot_be_described_is_refused_at_once() -> None:
    def no_doc(a: int) -> int:
        return a

    def no_type(a) -> int:  # type: ignore[no-untyped-def]
        """Do."""
        return a

    def star(*a: int) -> int:
        """Do."""
        return 1

    for function, said in ((no_doc, "docstring"), (no_type, "'a' has no type"), (star, "by name")):
        with pytest.raises(UsageError, match=said):
            tool(function)
    with pytest.raises(UsageError, match="two tools have the name 'add'"):
        Toolbox([add, add], context())


async def test_p02_a_malformed_call_is_answered_and_the_next_one_runs() -> None:
    bad, good = await answer(
        [add],
        call("", {}, "c1", error="Expecting ',' delimiter: line 1"),
        call("add", {"a": 1, "b": 2}, "c2"),
    )
    assert (bad.call_id, bad.error_kind, bad.failure) == ("c1", "malformed", "none")
    assert "Expecting ',' delimiter" in bad.content
    assert (good.call_id, good.content, good.error_kind) == ("c2", "3", "")


@pytest.mark.parametrize("arguments", ['{"x": 1}', [1], 3, True])
async def test_p03_arguments_that_are_not_an_object(arguments: object) -> None:
    (result,) = await answer([add], call("add", arguments))
    assert result.error_kind == "bad_arguments"
    assert "expected object" in result.content
    assert RAN == []


@pytest.mark.parametrize("arguments", [None, "", {}])
async def test_p03_null_and_empty_mean_no_arguments(arguments: object) -> None:
    @tool
    def ping() -> str:
        """Answer."""
        return "pong"

    (result,) = await answer([ping], call("ping", arguments))
    assert result.content == "pong"


async def test_p04_unknown_tool_and_wrong_arguments() -> None:
    results = await answer(
        [add],
        call("sub", {"a": 1, "b": 2}),
        call("add", {"a": "1", "b": 2}),
        call("add", {"a": 1}),
        call("add", {"a": 1, "b": 2, "c": 3}),
        call("add", {"a": 1.0, "b": True}),
        call("ad", {"a": 1, "b": 2}),
    )
    kinds = [result.error_kind for result in results]
    assert kinds == ["unknown_tool", *["bad_arguments"] * 4, "unknown_tool"]
    said = ["'sub'; known: 'add'", "a: input", "b: is missing", "c: there is no", "b: input", "mean 'add'"]
    for result, part in zip(results, said, strict=True):
        assert part in result.content
        assert "\n" not in result.content
    assert RAN == []


async def test_an_int_is_taken_for_a_float() -> None:
    @tool
    def half(x: float) -> float:
        """Halve."""
        return x / 2

    good, bad = await answer([half], call("half", {"x": 3}), call("half", {"x": "3"}))
    assert good.content == "1.5"
    assert bad.error_kind == "bad_arguments"


async def test_p05_several_calls_one_bad_and_a_cap() -> None:
    calls = (
        call("add", {"a": 1, "b": 2}, "c1"),
        call("add", {}, "c2", error="unbalanced braces"),
        call("add", {"a": 3, "b": 4}, "c3"),
    )
    results = await answer([add], *calls)
    assert [result.call_id for result in results] == ["c1", "c2", "c3"]
    assert (results[0].content, results[2].content) == ("3", "7")
    assert "unbalanced braces" in results[1].content
    assert RAN == [(1, 2), (3, 4)]
    capped = await answer([add], *calls, max_calls_per_turn=1)
    assert capped[0].content == "3"
    assert [result.error_kind for result in capped[1:]] == ["not_executed"] * 2
    assert all("not executed: limit of 1" in result.content for result in capped[1:])
    assert RAN == [(1, 2)]


async def test_p06_a_lone_surrogate_is_rejected_not_passed_on() -> None:
    @tool
    def echo(s: str) -> str:
        """Echo."""
        return s

    good, bad = await answer(
        [echo], call("echo", {"s": "caf\u00e9 \U0001f600"}), call("echo", {"s": "\ud83d"})
    )
    assert good.content == "café 😀"
    assert bad.error_kind == "bad_arguments"
    bad.content.encode("utf-8")


async def test_s06_a_blocking_tool_stalls_nobody() -> None:
    order: list[tuple[int, int]] = []

    @tool
    def slow(episode: int, number: int) -> str:
        """Block."""
        time.sleep(0.5 if number == 0 else 0)
        order.append((episode, number))
        return "ok"

    gaps: list[float] = []

    async def heartbeat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            gaps.append(time.monotonic() - before - 0.05)

    async def episode(at: int) -> tuple[ToolResult, ...]:
        async with Toolbox([slow], context()) as toolbox:
            return await toolbox.call_all([call("slow", {"episode": at, "number": n}) for n in (0, 1)])

    beat = asyncio.create_task(heartbeat())
    started = time.monotonic()
    results = await asyncio.gather(*(episode(at) for at in range(8)))
    total = time.monotonic() - started
    beat.cancel()
    assert total < 1.5
    assert max(gaps) < 0.2
    assert all(result.content == "ok" for pair in results for result in pair)
    for at in range(8):
        assert [number for episode_at, number in order if episode_at == at] == [0, 1]


async def test_failures_keep_their_kind() -> None:
    @tool
    def shop(what: str) -> str:
        """Buy."""
        if what == "gold":
            raise ExpectedFailure("gold is sold out")
        raise KeyError("no\nsuch shelf")

    @tool(timeout_s=0.1)
    async def hang() -> str:
        """Hang."""
        await asyncio.sleep(100)
        return ""

    @tool(timeout_s=0.1)
    def block() -> str:
        """Block."""
        time.sleep(1)
        return ""

    refused, crashed, hung, blocked = await answer(
        [shop, hang, block],
        call("shop", {"what": "gold"}),
        call("shop", {"what": "tin"}),
        call("hang", {}),
        call("block", {}),
    )
    assert (refused.failure, refused.content) == ("expected", "gold is sold out")
    assert crashed.failure == "abnormal"
    assert crashed.content.startswith("shop failed: KeyError")
    assert "\n" not in crashed.content
    for result in (hung, blocked):
        assert result.failure == "abnormal"
        assert "timed out after 0.1 s" in result.content
        assert 0.05 < result.wall_s < 0.9


async def test_cancelling_an_episode_is_not_a_tool_failure() -> None:
    @tool
    async def hang() -> str:
        """Hang."""
        await asyncio.sleep(100)
        return ""

    task = asyncio.create_task(answer([hang], call("hang", {})))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_long_output_keeps_head_and_tail() -> None:
    @tool(output_bytes=100)
    def much() -> str:
        """Say much."""
        return "first" + "é" * 1000 + "last"

    (result,) = await answer([much], call("much", {}))
    assert result.content.startswith("firsté")
    assert result.content.endswith("élast")
    assert "[1909 bytes dropped]" in result.content
    assert cap_output("short", 100) == "short"


async def test_a_tool_may_return_a_whole_result() -> None:
    @tool
    def rich() -> ToolResult:
        """Answer richly."""
        return ToolResult("", "", "text", failure="expected", data={"k": 1})

    (result,) = await answer([rich], call("rich", {}, "c9"))
    assert (result.call_id, result.name, result.content) == ("c9", "rich", "text")
    assert (result.failure, result.data) == ("expected", {"k": 1})


async def test_the_sandbox_starts_at_its_first_use_and_closes_with_the_toolbox() -> None:
    @tool
    async def peek(context: ToolContext) -> str:
        """Read a file."""
        return (await context.sandbox.read("f")).decode()

    box = CountingSandbox()
    async with Toolbox([peek, add], context(box)) as toolbox:
        await toolbox.call_all([call("add", {"a": 1, "b": 2})])
        assert box.events == []
        await toolbox.call_all([call("peek", {}), call("peek", {})])
        assert box.events == ["open", "read f", "read f"]
    assert box.events[-1] == "close"
    unused = CountingSandbox()
    async with Toolbox([peek], context(unused)):
        pass
    assert unused.events == []


async def test_s13_a_dead_sandbox_ends_the_episode() -> None:
    @tool
    async def peek(context: ToolContext) -> str:
        """Read a file."""
        return (await context.sandbox.read("f")).decode()

    async with Toolbox([peek], context(CountingSandbox(broken=True))) as toolbox:
        with pytest.raises(SandboxError, match="gone"):
            await toolbox.call_all([call("peek", {})])
