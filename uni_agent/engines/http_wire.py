"""Messages to and from the OpenAI chat completions format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from uni_agent.errors import EngineError
from uni_agent.protocols import ChatRequest, Reply
from uni_agent.types import Finish, Message, Sampling, ToolCall

_LENGTH = ("length", "max_tokens")


def request_body(model: str, request: ChatRequest, sampling: Sampling) -> dict[str, Any]:
    """The JSON of a call. top_k and stop_token_ids are sent only where set: OpenAI itself has neither."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [write_message(message) for message in request.messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.top_p < 1:
        body["top_p"] = sampling.top_p
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in request.tools
        ]
    return body


def write_message(message: Message) -> dict[str, Any]:
    """One message in the OpenAI shape; reasoning stays here, endpoints do not take it back."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _write_arguments(call)},
            }
            for call in message.tool_calls
        ]
        if not message.content:
            out["content"] = None
    return out


def read_reply(body: Any, url: str) -> Reply:
    """The first choice of an answer. Raises EngineError when it has not the expected shape."""
    try:
        choice = body["choices"][0]
        said: Mapping[str, Any] = choice["message"]
        calls = tuple(_read_call(call, i) for i, call in enumerate(said.get("tool_calls") or ()))
        content = said.get("content") or ""
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        usage: Mapping[str, Any] = body.get("usage") or {}
        finish: Finish = "length" if choice.get("finish_reason") in _LENGTH else "stop"
        counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(
            f"{url} answered without choices[0].message in the OpenAI shape: {json.dumps(body)[:300]}"
        ) from error
    # MessageError, if the content is an image or another part that is not text, is raised by Message
    message = Message("assistant", content, tool_calls=calls, reasoning=reasoning)
    return Reply(message, finish, counts[0], counts[1])


def _write_arguments(call: ToolCall) -> str:
    """A JSON object as a string. Servers parse it, so a malformed call's own text is wrapped."""
    if call.error is None:
        return json.dumps(dict(call.arguments), ensure_ascii=False)
    return json.dumps({"malformed": call.raw}, ensure_ascii=False)


def _read_call(call: Mapping[str, Any], index: int) -> ToolCall:
    function = call["function"]
    raw = function.get("arguments")
    arguments, error = _read_arguments(raw)
    name = function.get("name") or ""
    if not name:
        error = "the call has no name"
    return ToolCall(
        id=str(call.get("id") or f"call_{index}"),
        name=str(name),
        arguments=arguments,
        raw=raw if isinstance(raw, str) else json.dumps(raw),
        error=error,
    )


def _read_arguments(raw: Any) -> tuple[dict[str, Any], str | None]:
    """Arguments as an object; null and "" mean none. Some servers send the object itself."""
    value = raw
    if isinstance(raw, str) and raw.strip():
        try:
            # strict=False: models write raw newlines and tabs into code, and mean them
            value = json.loads(raw, strict=False)
        except (ValueError, RecursionError) as problem:
            return {}, f"invalid JSON: {problem}"
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}, None
    if isinstance(value, dict):
        return cast(dict[str, Any], value), None
    return {}, f"arguments must be an object (expected object, got {type(value).__name__})"
