"""The arguments of a tool: one JSON schema for the model, one strict check of what it sent.

In: names, types and descriptions. Out: a schema, and for each call either values or one line that says
what was wrong. Nothing is coerced: '1' is not 1 (an int is taken where a float is wanted).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

_MAX_PROBLEMS = 3
_MAX_INPUT = 60


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. `default` is `...` for a required one."""

    name: str
    annotation: Any
    description: str = ""
    default: Any = ...


class BadArguments(Exception):
    """A call's arguments do not fit the tool's schema; the text tells the model what to change."""


class Arguments:
    """What a tool takes; `schema` goes to the model, `validate` checks what comes back."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        fields: dict[str, Any] = {}
        for argument in arguments:
            fields[f"arg_{argument.name}"] = (
                argument.annotation,
                pydantic.Field(
                    default=argument.default, alias=argument.name, description=argument.description or None
                ),
            )
        config = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=False)
        self._model: type[pydantic.BaseModel] = pydantic.create_model(
            "Arguments", __config__=config, **fields
        )
        self._names = [argument.name for argument in arguments]
        self.schema: Mapping[str, Any] = _plain_schema(self._model.model_json_schema())

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values by name. Raises BadArguments, naming each field that is wrong."""
        try:
            # through JSON, whose strict rules fit: a list may be a tuple, a string may be an enum
            model = self._model.model_validate_json(json.dumps(dict(arguments)))
        except pydantic.ValidationError as error:
            problems = [_problem(detail) for detail in error.errors(include_url=False)]
            more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
            raise BadArguments("; ".join(problems[:_MAX_PROBLEMS]) + more) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"the arguments are not JSON: {error}") from error
        values: dict[str, Any] = {name: getattr(model, f"arg_{name}") for name in self._names}
        return values


def _problem(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "arguments"
    match detail["type"]:
        case "missing":
            return f"{where}: is missing"
        case "extra_forbidden":
            return f"{where}: there is no such argument"
        case _:
            shown = repr(detail["input"])
            shown = shown if len(shown) <= _MAX_INPUT else shown[: _MAX_INPUT - 3] + "..."
            message = detail["msg"]
            return f"{where}: {message[:1].lower()}{message[1:]}, got {shown}"


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop what costs tokens and says nothing: generated titles, and `null` beside an optional type."""
    out = _without_titles(schema)
    out.pop("additionalProperties", None)
    out.setdefault("properties", {})
    for name, prop in out["properties"].items():
        kinds = prop.get("anyOf", [])
        if "default" in prop and prop["default"] is None:
            rest = [kind for kind in kinds if kind != {"type": "null"}]
            if len(rest) == 1:
                kept = {key: value for key, value in prop.items() if key not in ("anyOf", "default")}
                out["properties"][name] = {**rest[0], **kept}
    out["properties"] = {name: _type_first(prop) for name, prop in out["properties"].items()}
    return {key: out.pop(key) for key in ("type", "properties", "required") if key in out} | out


def _type_first(prop: dict[str, Any]) -> dict[str, Any]:
    return {**{key: prop[key] for key in ("type", "description") if key in prop}, **prop}


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs"):  # their keys are names, perhaps "title"
            out[key] = {name: _without_titles(item) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        else:
            out[key] = _without_titles(value)
    return out
