"""Tool calls as text: reading and writing the JSON manner of Hermes and Qwen.

In: what a model wrote. Out: ToolCalls, of which those that do not parse carry an error. Nothing is
repaired and nothing is dropped; raw control characters in strings and prose after the JSON, which
models write all the time and which leave no doubt, are read as they are meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

from uni_agent.types import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
UNCLOSED = "unclosed: the call was cut off before its end"

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')
_JSON_KIND = {
    str: "string",
    list: "list",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


class CallBody(NamedTuple):
    """A call's parts as far as they could be read, what is wrong with it, and where its JSON ends."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None
    end: int


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _json_kind(value: Any) -> str:
    return _JSON_KIND.get(type(value), type(value).__name__)


# strict=False: models write raw newlines and tabs into code arguments, and mean them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)


def read_arguments(value: object) -> tuple[Mapping[str, Any], str | None]:
    """Read a call's arguments: an object as it is, null and "" as {}; anything else is an error."""
    if value is None or value == "":
        return {}, None
    if isinstance(value, dict):
        return cast(dict[str, Any], value), None
    return {}, f"arguments must be an object (expected object, got {_json_kind(value)})"


def read_call(body: str, start: int = 0) -> CallBody:
    """Read `{"name": ..., "arguments": {...}}` from `body[start:]`.

    Prose after the object is allowed; more JSON is an error, for it is not clear what was meant.
    """
    while start < len(body) and body[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError) as problem:
        found = _NAME.search(body, start)
        return CallBody(found[1] if found else "", {}, f"invalid JSON: {problem}", start)
    if not isinstance(value, dict):
        error = f"a call must be an object with name and arguments, got a {_json_kind(value)}"
        return CallBody("", {}, error, end)
    call = cast(dict[str, Any], value)
    name = call.get("name")
    arguments, error = read_arguments(call.get("arguments"))
    if not isinstance(name, str) or not name:
        return CallBody("", arguments, "the call has no name", end)
    return CallBody(name, arguments, error, end)


def read_block(body: str) -> CallBody:
    """Read the whole text between the call markers."""
    call = read_call(body)
    rest = body[call.end :].strip()
    if call.error is None and rest and rest[0] in ',:}]"{[':
        return call._replace(error=f"invalid JSON: more JSON after the call's object: {rest[:40]!r}")
    return call


def call_text(call: ToolCall) -> str:
    """Write a call between its markers; one that did not parse as the model wrote it."""
    if call.error is not None and call.raw:
        return call.raw
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def assistant_text(message: Message) -> str:
    """Write an assistant's turn: reasoning, content, calls."""
    body = "\n".join(part for part in [message.content, *map(call_text, message.tool_calls)] if part)
    if message.reasoning is None:
        return body
    return f"{THINK}\n{message.reasoning}\n{END_THINK}\n\n{body}"


def read_assistant(text: str, *, reasoning_open: bool = False) -> Message:
    """Read an assistant's turn: the inverse of `assistant_text`.

    `reasoning_open` says that the prompt had opened the reasoning already. Text outside the calls is
    content. A call without its closing marker has the error "unclosed".
    """
    reasoning: str | None = None
    opened = text.lstrip().startswith(THINK)
    if opened or reasoning_open:
        inner = text.lstrip().removeprefix(THINK) if opened else text
        inner, closed, text = inner.partition(END_THINK)
        reasoning = inner.strip()
        if not closed:
            return Message("assistant", "", reasoning=reasoning)
    outside: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (begin := text.find(OPEN, position)) != -1:
        outside.append(text[position:begin])
        body = begin + len(OPEN)
        # The marker may stand inside a string of the call: look for it after the JSON, if it parses.
        close = text.find(CLOSE, max(body, read_call(text, body).end))
        position = len(text) if close == -1 else close + len(CLOSE)
        read = read_block(text[body : len(text) if close == -1 else close])
        error = UNCLOSED if close == -1 else read.error
        calls.append(ToolCall(f"call_{len(calls)}", read.name, read.arguments, text[begin:position], error))
    outside.append(text[position:])
    content = "\n".join(part for part in map(str.strip, outside) if part)
    return Message("assistant", content, tuple(calls), reasoning=reasoning)
