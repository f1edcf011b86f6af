"""Tools that exit, lose their words, or answer with half a character."""

from __future__ import annotations

import asyncio

import pytest

from uni_agent.protocols import ToolContext
from uni_agent.sandbox import local_sandbox
from uni_agent.tools import Toolbox, tool
from uni_agent.types import Task, ToolCall

CONTEXT = ToolContext(Task("t", ()), local_sandbox()(), 0)


async def test_a_tool_that_exits_or_is_cancelled_within_is_an_answer_and_ends_nothing() -> None:
    @tool
    def leaves() -> str:
        """Leave."""
        raise SystemExit(3)

    @tool
    async def leaves_too() -> str:
        """Leave."""
        raise SystemExit(3)

    @tool
    async def lost() -> str:
        """Wait for something that was cancelled."""
        raise asyncio.CancelledError

    @tool
    def mute() -> str:
        """Fail without words."""

        class Mute(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise Mute

    box = Toolbox([leaves, leaves_too, lost, mute], CONTEXT)
    names = ("leaves", "leaves_too", "lost", "mute")
    results = await box.call_all([ToolCall(name, name, {}) for name in names])
    assert [result.failure for result in results] == ["abnormal"] * 4
    assert [result.content for result in results] == [
        "leaves failed: RuntimeError: SystemExit: 3",
        "leaves_too failed: SystemExit: 3",
        "lost failed: CancelledError",
        "mute failed: Mute",
    ]


async def test_cancelling_the_episode_still_reaches_its_tool() -> None:
    started = asyncio.Event()

    @tool
    async def waits() -> str:
        """Wait."""
        started.set()
        await asyncio.Event().wait()
        return ""

    box = Toolbox([waits], CONTEXT)
    running = asyncio.create_task(box.call_all([ToolCall("c", "waits", {})]))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_lone_surrogates_do_not_reach_the_tokenizer() -> None:
    @tool
    def half() -> str:
        """Give half a character."""
        return "a\ud83db\x00"

    box = Toolbox([half], CONTEXT)
    (result,) = await box.call_all([ToolCall("c", "half", {})])
    assert result.content == "a?b\x00"
