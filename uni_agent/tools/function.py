"""A typed Python function becomes a tool.

In: a function with annotations and a docstring. Out: a Tool whose schema, argument check, time-out and
output cap come from it. It knows nothing of episodes; a parameter of type ToolContext is handed in.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, cast, get_type_hints, overload

import docstring_parser
import pydantic_core

from uni_agent.errors import UsageError
from uni_agent.protocols import ToolContext
from uni_agent.tools.arguments import Argument, Arguments, BadArguments
from uni_agent.types import ToolResult, ToolSpec

Function = Callable[..., Any]


class ExpectedFailure(Exception):
    """A refusal that belongs to the tool's business (sold out, not found); its text goes to the model."""


class FunctionTool:
    """A tool made of a function; see `tool`. Still callable as the function it was."""

    def __init__(self, function: Function, *, name: str, timeout_s: float, output_bytes: int) -> None:
        self._function = function
        self._output_bytes = output_bytes
        self._is_async = inspect.iscoroutinefunction(function)
        self.timeout_s = timeout_s
        description, arguments, self._context_name = _read_function(function, name)
        self._arguments = Arguments(arguments)
        self.spec = ToolSpec(name, description, self._arguments.schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function."""
        return self._function(*args, **kwargs)

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Check the arguments and run; a synchronous function runs in a thread of its own.

        Raises what the function raises.
        """
        try:
            values = self._arguments.validate(arguments)
        except BadArguments as error:
            return bad_arguments(self.spec.name, str(error))
        if self._context_name is not None:
            values[self._context_name] = context
        if self._is_async:
            value = await cast(Awaitable[object], self._function(**values))
        else:
            value = await _in_thread(self._function, values)
        return self._result(value)

    def _result(self, value: object) -> ToolResult:
        if isinstance(value, ToolResult):
            return replace(value, content=cap_output(value.content, self._output_bytes))
        text = value if isinstance(value, str) else _as_json(value)
        return ToolResult("", self.spec.name, cap_output(text, self._output_bytes))


@overload
def tool(function: Function, /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, timeout_s: float = 30.0, output_bytes: int = 1 << 14
) -> Callable[[Function], FunctionTool]: ...
def tool(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float = 30.0,
    output_bytes: int = 1 << 14,
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Make a tool of a typed function with a docstring, sync or async.

    Each argument's type becomes its JSON schema and its strict check; the docstring's first lines
    describe the tool and its `Args` the arguments. A parameter annotated ToolContext is filled in. The
    result is kept if it is a str or a ToolResult, else sent as JSON; beyond `output_bytes` its head and
    tail are kept. Raise ExpectedFailure to refuse; any other exception counts as abnormal. A
    synchronous function that overruns `timeout_s` is abandoned in its thread: it cannot be stopped.
    Raises UsageError at once for a parameter without a type or a function without a docstring.
    """

    def make(function: Function) -> FunctionTool:
        return FunctionTool(
            function, name=name or function.__name__, timeout_s=timeout_s, output_bytes=output_bytes
        )

    return make if function is None else make(function)


def bad_arguments(name: str, problem: str) -> ToolResult:
    """The answer to a call whose arguments do not fit."""
    return ToolResult("", name, f"{name} was not run: {problem}", error_kind="bad_arguments")


def cap_output(text: str, limit_bytes: int) -> str:
    """Keep head and tail of a text longer than `limit_bytes` of UTF-8, with a marker between."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text
    head, tail = limit_bytes - limit_bytes // 2, limit_bytes // 2
    marker = f"\n... [{len(data) - limit_bytes} bytes dropped] ...\n"
    return data[:head].decode("utf-8", "ignore") + marker + data[len(data) - tail :].decode("utf-8", "ignore")


def _as_json(value: object) -> str:
    return json.dumps(pydantic_core.to_jsonable_python(value), ensure_ascii=False)


def _read_function(function: Function, name: str) -> tuple[str, list[Argument], str | None]:
    """Read description, arguments and the context parameter's name. Raises UsageError."""
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    description = "\n".join(part for part in (doc.short_description, doc.long_description) if part)
    if not description:
        raise UsageError(f"tool {name!r} has no docstring; say in one line what it does, for the model")
    told = {param.arg_name: " ".join((param.description or "").split()) for param in doc.params}
    hints = get_type_hints(function, include_extras=True)
    arguments: list[Argument] = []
    context_name: str | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name; name each one"
            )
        if parameter.name not in hints:
            raise UsageError(f"tool {name!r}: parameter {parameter.name!r} has no type; annotate it")
        if hints[parameter.name] is ToolContext:
            context_name = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        arguments.append(
            Argument(parameter.name, hints[parameter.name], told.get(parameter.name, ""), default)
        )
    return description, arguments, context_name


async def _in_thread(function: Function, values: Mapping[str, Any]) -> object:
    """Run in a daemon thread of its own: a call that hangs must hold neither a pool nor the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: object, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value: object = None
        failed: Exception | None = None
        try:
            value = context.run(lambda: function(**values))
        except Exception as error:
            # a future cannot carry StopIteration
            stopped = isinstance(error, StopIteration)
            failed = RuntimeError(f"StopIteration: {error}") if stopped else error
        except BaseException as error:  # SystemExit, say: it would end the loop that waits, and the run
            failed = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            loop.call_soon_threadsafe(settle, value, failed)
        except RuntimeError:
            return  # the loop has closed: nobody waits any more

    threading.Thread(target=work, name=f"tool-{function.__name__}", daemon=True).start()
    return await future
