"""Episodes to JSON text and back, exactly: everything of an Episode but its token arrays and artifacts.

The text is plain ASCII JSON without NaN literals: control characters and lone surrogates are escaped,
and what JSON has no word for (NaN, tuples, bytes, numpy arrays, keys that are not text) is an object
with one key that starts with `$`. A value of an unknown class is kept as its repr, and comes back as
that text: a strange object in a tool's data must not cost the record of a step.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from uni_agent.types import (
    Episode,
    Message,
    Sampling,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
Array = npt.NDArray[Any]


class Tokens(NamedTuple):
    """The arrays of one trajectory, each [T]: int32, bool, float32, int32."""

    token_ids: Array
    sampled: Array
    logprobs: Array
    versions: Array


def dump_episode(episode: Episode) -> str:
    """All fields but the task, the token arrays and the artifacts' contents (their paths are kept)."""
    return _dump(
        {
            "id": episode.id,
            "end": episode.end,
            "reward": episode.reward,
            "rewards": dict(episode.rewards),
            "reward_reason": episode.reward_reason,
            "error": episode.error,
            "metrics": dict(episode.metrics),
            "seed": episode.seed,
            "trainable": episode.trainable,
            "artifacts": list(episode.artifacts),
            "trajectories": [
                {"agent": trajectory.agent, "turns": [_turn(turn) for turn in trajectory.turns]}
                for trajectory in episode.trajectories
            ],
        }
    )


def load_episode(text: str, task: Task, tokens: Sequence[Tokens], artifacts: Sequence[bytes]) -> Episode:
    """The inverse of `dump_episode`."""
    data = unpack(json.loads(text))
    return Episode(
        id=data["id"],
        task=task,
        trajectories=tuple(
            Trajectory(item["agent"], *arrays, turns=tuple(_load_turn(turn) for turn in item["turns"]))
            for item, arrays in zip(data["trajectories"], tokens, strict=True)
        ),
        end=data["end"],
        rewards=data["rewards"],
        reward=data["reward"],
        reward_reason=data["reward_reason"],
        artifacts=dict(zip(data["artifacts"], artifacts, strict=True)),
        error=data["error"],
        metrics=data["metrics"],
        seed=data["seed"],
        trainable=data["trainable"],
    )


def dump_task(task: Task) -> str:
    """A task with its data."""
    prompt = [_message(message) for message in task.prompt]
    return _dump({"id": task.id, "prompt": prompt, "data": dict(task.data)})


def load_task(text: str) -> Task:
    """The inverse of `dump_task`."""
    data = unpack(json.loads(text))
    return Task(data["id"], tuple(_load_message(item) for item in data["prompt"]), data["data"])


def pack(value: object) -> Any:
    """A value as JSON can hold it; see the module's docstring."""
    kind = type(value)
    if kind is str:
        return _pack_text(cast("str", value))
    if value is None or kind in (int, bool):
        return value
    if kind is float:
        return value if math.isfinite(cast("float", value)) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        return _pack_mapping(cast("Mapping[object, object]", value))
    if kind is list:
        return [pack(item) for item in cast("list[object]", value)]
    for known, (tag, plain) in _TAGGED.items():
        if isinstance(value, known):
            return {tag: plain(value)}
    if isinstance(value, np.generic):
        return pack(value.item())
    if isinstance(value, str):  # a subclass, such as an enum
        return _pack_text(str.__str__(value))
    if isinstance(value, int | float):
        return pack(int(value) if isinstance(value, int) else float(value))
    return {"$repr": repr(value)}


def unpack(value: Any) -> Any:
    """The inverse of `pack`, on what json.loads returned."""
    if isinstance(value, list):
        return [unpack(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    items = cast("dict[str, Any]", value)
    if len(items) == 1:
        (tag, body), *_ = items.items()
        if tag in _UNTAGGED:
            return _UNTAGGED[tag](body)
    return {key: unpack(item) for key, item in items.items()}


def _pack_text(text: str) -> Any:
    """JSON reads two escaped surrogates side by side as one character: such text is kept as bytes."""
    if text.isascii() or not _PAIR.search(text):
        return text
    return {"$text": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}


def _pack_mapping(value: Mapping[object, object]) -> Any:
    if all(type(key) is str and not key.startswith("$") and pack(key) == key for key in value):
        return {key: pack(item) for key, item in value.items()}
    return {"$map": [[pack(key), pack(item)] for key, item in value.items()]}


def _pack_all(value: Iterable[object]) -> list[Any]:
    return [pack(item) for item in value]


def _pack_array(value: Array) -> Any:
    if value.dtype.hasobject:
        return {"list": pack(value.tolist())}
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def _load_array(body: Mapping[str, Any]) -> Array:
    if "list" in body:
        return np.asarray(unpack(body["list"]), object)
    data = base64.b64decode(body["data"])
    return np.frombuffer(data, np.dtype(body["dtype"])).reshape(body["shape"]).copy()


_TAGGED: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", _pack_all),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    set: ("$set", _pack_all),
    frozenset: ("$frozenset", _pack_all),
    np.ndarray: ("$array", _pack_array),
}
_UNTAGGED: dict[str, Callable[[Any], Any]] = {
    "$text": lambda body: base64.b64decode(body).decode("utf-8", "surrogatepass"),
    "$float": float,
    "$map": lambda body: {unpack(key): unpack(item) for key, item in body},
    "$tuple": lambda body: tuple(unpack(item) for item in body),
    "$bytes": base64.b64decode,
    "$set": lambda body: {unpack(item) for item in body},
    "$frozenset": lambda body: frozenset(unpack(item) for item in body),
    "$array": _load_array,
    "$repr": str,
}


def _dump(value: Mapping[str, object]) -> str:
    return json.dumps(pack(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _turn(turn: Turn) -> dict[str, object]:
    return {
        "observation": list(turn.observation),
        "sampled": list(turn.sampled),
        "observed": [_message(message) for message in turn.observed],
        "message": _message(turn.message),
        "finish": turn.finish,
        "sampling": asdict(turn.sampling),
        "tool_results": [_flat(result, ToolResult) for result in turn.tool_results],
        "reward": turn.reward,
        "timing": asdict(turn.timing),
    }


def _load_turn(data: dict[str, Any]) -> Turn:
    return Turn(
        observation=tuple(data["observation"]),
        sampled=tuple(data["sampled"]),
        observed=tuple(_load_message(item) for item in data["observed"]),
        message=_load_message(data["message"]),
        finish=data["finish"],
        sampling=Sampling(**data["sampling"]),
        tool_results=tuple(ToolResult(**item) for item in data["tool_results"]),
        reward=data["reward"],
        timing=Timing(**data["timing"]),
    )


def _message(message: Message) -> dict[str, object]:
    calls = [_flat(call, ToolCall) for call in message.tool_calls]
    return {**_flat(message, Message), **({"tool_calls": calls} if calls else {})}


def _load_message(data: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in data.pop("tool_calls", ()))
    return Message(**data, tool_calls=calls)


def _flat(value: object, kind: type[Message | ToolCall | ToolResult]) -> dict[str, object]:
    """Fields by name, without those that hold their default."""
    found: dict[str, object] = {}
    for name, default in _DEFAULTS[kind].items():
        item = getattr(value, name)
        if type(item) is not type(default) or item != default:
            found[name] = item
    return found


def _defaults(kind: type[Message | ToolCall | ToolResult]) -> dict[str, object]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
        if field.name != "tool_calls"
    }


_DEFAULTS = {kind: _defaults(kind) for kind in (Message, ToolCall, ToolResult)}
