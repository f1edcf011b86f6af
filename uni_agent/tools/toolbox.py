"""An episode's tools: runs the calls of a turn and answers each of them.

In: tool calls as the renderer parsed them. Out: one ToolResult per call, in order. What the model did
wrong becomes an answer that teaches; only a fault of the sandbox, or a tool that says so (ToolError),
ends the episode. It does not know the environment, the policy or tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from uni_agent.errors import SandboxError, ToolError, UsageError, nearest
from uni_agent.protocols import Sandbox, SandboxLimits, SandboxResult, Tool, ToolContext
from uni_agent.tools.function import ExpectedFailure, bad_arguments
from uni_agent.types import ToolCall, ToolResult, ToolSpec

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 300


class Toolbox:
    """The tools of one episode; used with `async with`.

    `context.sandbox` must not be open yet: it is started at the first use by a tool and closed with the
    toolbox. Calls of a turn run one after the other, at most `max_calls_per_turn`; each further one is
    answered as not executed. Raises UsageError for two tools of one name.
    """

    def __init__(self, tools: Sequence[Tool], context: ToolContext, *, max_calls_per_turn: int = 8) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"two tools have the name {twice!r}; give one of them another")
        self._sandbox = _LazySandbox(context.sandbox)
        self._context = replace(context, sandbox=self._sandbox)
        self._max_calls_per_turn = max_calls_per_turn

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told of the tools."""
        return tuple(tool.spec for tool in self._tools.values())

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sandbox.close()

    async def call_all(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Answer each call, in order. Raises SandboxError and ToolError; nothing else by intent."""
        results: list[ToolResult] = []
        for number, call in enumerate(calls):
            started = time.monotonic()
            if number >= self._max_calls_per_turn:
                limit = self._max_calls_per_turn
                result = _refusal(call, "not_executed", f"not executed: limit of {limit} call(s) per turn")
            else:
                result = await self._answer(call)
            wall_s = time.monotonic() - started
            # No tokenizer takes lone surrogates, which JSON can write and a program can print.
            content = result.content.encode("utf-8", "replace").decode()
            results.append(replace(result, call_id=call.id, name=call.name, content=content, wall_s=wall_s))
        return tuple(results)

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return _refusal(call, "malformed", f"the call could not be parsed: {call.error}")
        tool = self._tools.get(call.name)
        if tool is None:
            known = nearest(call.name, self._tools)
            return _refusal(call, "unknown_tool", f"there is no tool {call.name!r}; {known}")
        sent = cast(object, call.arguments)  # what a model or a foreign harness sends need not be an object
        if sent is None or sent == "":
            return await self._run(tool, call, {})
        if not isinstance(sent, Mapping):
            kind = type(sent).__name__
            return bad_arguments(call.name, f"expected object (a JSON object of arguments), got {kind}")
        return await self._run(tool, call, call.arguments)

    async def _run(self, tool: Tool, call: ToolCall, arguments: Mapping[str, object]) -> ToolResult:
        clock = asyncio.timeout(tool.timeout_s)
        try:
            async with clock:
                return await tool.call(arguments, self._context)
        except ExpectedFailure as refusal:
            return ToolResult("", call.name, str(refusal), failure="expected")
        except (SandboxError, ToolError):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _abnormal(call, _one_line(call.name, error))  # something of the tool's own was cancelled
        except TimeoutError as error:
            if clock.expired():
                return _abnormal(call, f"{call.name} timed out after {tool.timeout_s:g} s")
            return _abnormal(call, _one_line(call.name, error))
        except (Exception, SystemExit) as error:
            _log.debug("tool %s of task %s failed", call.name, self._context.task.id, exc_info=True)
            return _abnormal(call, _one_line(call.name, error))


class _LazySandbox:
    """Starts the sandbox behind it when a tool first needs it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._lock = asyncio.Lock()
        self._started = False

    async def _open(self) -> Sandbox:
        async with self._lock:
            if not self._started:
                await self._sandbox.__aenter__()
                self._started = True
        return self._sandbox

    async def close(self) -> None:
        """Close the sandbox if it was started."""
        if self._started:
            self._started = False
            await self._sandbox.__aexit__(None, None, None)

    async def __aenter__(self) -> _LazySandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None  # the toolbox closes it

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        return await (await self._open()).exec(argv, stdin=stdin, env=env, limits=limits)

    async def run_python(
        self, code: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> SandboxResult:
        return await (await self._open()).run_python(code, stdin=stdin, limits=limits)

    async def read(self, path: str) -> bytes:
        return await (await self._open()).read(path)

    async def write(self, path: str, content: bytes) -> None:
        await (await self._open()).write(path, content)


def _refusal(call: ToolCall, kind: str, text: str) -> ToolResult:
    return ToolResult(call.id, call.name, text, error_kind=kind)


def _abnormal(call: ToolCall, text: str) -> ToolResult:
    return ToolResult(call.id, call.name, text, failure="abnormal")


def _one_line(name: str, error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())[:_MAX_MESSAGE]
    except Exception:  # the exception's class is the tool's own
        text = ""
    return f"{name} failed: {type(error).__name__}" + (f": {text}" if text else "")
