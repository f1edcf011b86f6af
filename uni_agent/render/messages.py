"""Chat messages to and from the OpenAI JSON shape.

In: dicts as datasets and chat endpoints write them. Out: our typed nouns, and back. Knows nothing of
tokens, templates or models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from uni_agent.errors import MessageError
from uni_agent.protocols import RenderedDialogue
from uni_agent.render.calls import read_arguments
from uni_agent.types import Message, Role, ToolCall, ToolSpec


def message_from_json(obj: Mapping[str, Any]) -> Message:
    """Read one OpenAI-shaped message.

    Content may be a string, None, or a list of text parts; call arguments a JSON string or an object
    ("" and None read as {}). Arguments that do not parse are kept as a call with `error` set. Raises
    MessageError, which names a part that is not text.
    """
    role = obj.get("role")
    if role not in get_args(Role):
        raise MessageError(f"message role {role!r} is unknown; expected one of {', '.join(get_args(Role))}")
    calls: Sequence[Mapping[str, Any]] = obj.get("tool_calls") or ()
    reasoning = obj.get("reasoning_content")
    if reasoning is None:
        reasoning = obj.get("reasoning")
    return Message(
        role=cast(Role, role),
        content=_text(cast(Role, role), obj.get("content")),
        tool_calls=tuple(_call_from_json(call, index) for index, call in enumerate(calls)),
        tool_call_id=obj.get("tool_call_id"),
        name=obj.get("name"),
        reasoning=reasoning,
    )


def dialogue_from_json(obj: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> tuple[Message, ...]:
    """Read a conversation: a list of messages, or an object that holds it under "messages"."""
    messages: Any = obj.get("messages") if isinstance(obj, Mapping) else obj
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise MessageError(
            f"a dialogue must be a non-empty list of messages, got {type(messages).__name__}; "
            'write [{"role": "user", "content": "..."}, ...] or {"messages": [...]}'
        )
    return tuple(message_from_json(message) for message in cast(Sequence[Mapping[str, Any]], messages))


def message_to_json(message: Message) -> dict[str, Any]:
    """Write a message as chat endpoints want it (call arguments as a JSON string)."""
    return _to_json(message, arguments_as_text=True)


def message_to_template(message: Message) -> dict[str, Any]:
    """Write a message as chat templates want it: call arguments as an object.

    A call that did not parse goes back into the content as the model wrote it: a template would
    otherwise print a call that was never made.
    """
    return _to_json(message, arguments_as_text=False)


def tool_to_json(tool: ToolSpec) -> dict[str, Any]:
    """Write a tool in the OpenAI envelope."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def tool_from_json(obj: Mapping[str, Any]) -> ToolSpec:
    """Read a tool, in the OpenAI envelope or bare."""
    function: Mapping[str, Any] = obj.get("function", obj)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"a tool must have a name, got {json.dumps(obj, default=str)[:200]}")
    return ToolSpec(name, function.get("description") or "", function.get("parameters") or {"type": "object"})


def truncate(dialogue: RenderedDialogue, num_tokens: int) -> RenderedDialogue:
    """Keep the first `num_tokens` tokens; mask and attribution stay aligned."""
    if num_tokens < 0:
        raise ValueError(f"cannot truncate a dialogue to {num_tokens} tokens; expected 0 or more")
    return RenderedDialogue(
        dialogue.token_ids[:num_tokens], dialogue.sampled[:num_tokens], dialogue.message_index[:num_tokens]
    )


def _to_json(message: Message, *, arguments_as_text: bool) -> dict[str, Any]:
    content, calls = message.content, message.tool_calls
    if not arguments_as_text:
        broken = [call.raw for call in calls if call.error is not None and call.raw]
        content = "\n".join(part for part in [content, *broken] if part)
        calls = tuple(call for call in calls if call.error is None)
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
    if calls:
        result["tool_calls"] = [_call_to_json(call, arguments_as_text) for call in calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def _call_to_json(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = dict(call.arguments)
    if arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_from_json(obj: Mapping[str, Any], index: int) -> ToolCall:
    function: Mapping[str, Any] = obj.get("function") or {}
    name = function.get("name") or ""
    given = function.get("arguments")
    raw, error = "", None
    if isinstance(given, str) and given.strip():
        raw = given
        try:
            given = json.loads(given, strict=False)
        except (ValueError, RecursionError) as problem:
            given, error = None, f"arguments are not JSON: {problem}"
    arguments, shape_error = read_arguments(given)
    return ToolCall(
        id=obj.get("id") or f"call_{index}",
        name=name,
        arguments=arguments,
        raw=raw,
        error=error or shape_error or (None if name else "the call has no name"),
    )


def _text(role: Role, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = cast(Sequence[Any], content) if isinstance(content, Sequence) else [content]
    return "".join(_part_text(role, part) for part in parts)


def _part_text(role: Role, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        fields = cast(dict[str, Any], part)
        kind, text = fields.get("type"), fields.get("text")
        if kind == "text" and isinstance(text, str):
            return text
    else:
        kind = type(part).__name__
    raise MessageError(
        f"{role} message has a content part of kind {kind!r}; only text can be rendered; "
        "remove the part or describe it in words"
    )
