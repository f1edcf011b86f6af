"""Configs and config classes as text: TOML that loads back, tables for a reader."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import RootModel
from pydantic.fields import FieldInfo

from uni_agent.config.shape import UNKNOWN, BaseConfig, has_surrogate, keys_of, type_name
from uni_agent.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ConfigRow(NamedTuple):
    """One key of a config class, as a reader wants to see it. `default` is TOML, or "required"."""

    key: str
    type: str
    default: str
    doc: str


def to_toml(config: BaseConfig) -> str:
    """Write every key with its value; `load_config` reads an equal config back."""
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    # values first: in TOML a key after a [table] heading would belong to that table
    for key, value in table.items():
        if not isinstance(value, dict):
            lines.append(f"{_toml_key(key)} = {toml_value(value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            below = (*path, key)
            lines.append(f"\n[{'.'.join(map(_toml_key, below))}]")
            _write_table(typing.cast("dict[str, Any]", value), below, lines)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def toml_value(value: object) -> str:
    """One value as TOML text; None is "none", which `load_config` reads as None."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in typing.cast("Sequence[object]", value)) + "]"
    if isinstance(value, dict):
        pairs = typing.cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in pairs) + "}"
    text = str(value)
    if has_surrogate(text):
        raise ConfigError(f"the value {text!r} is not valid Unicode and cannot be written to a file")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe(cls: type[BaseConfig]) -> list[ConfigRow]:
    """List every key: dotted name, type with its bounds, default, documentation."""
    rows: list[ConfigRow] = []
    for key in keys_of(cls):
        if not key.is_table:
            default = (
                "required"
                if key.default is UNKNOWN
                else toml_value(_Value(key.default).model_dump(mode="json"))
            )
            doc = " ".join((key.info.description or "").split())
            rows.append(ConfigRow(key.name, type_name(key.info.annotation) + _bounds(key.info), default, doc))
    return rows


class _Value(RootModel[Any]):
    """Any value, to be dumped as pydantic dumps it inside a config."""


def toml_skeleton(cls: type[BaseConfig]) -> str:
    """A TOML file with every key at its default and its documentation above it."""
    tables: dict[str, list[ConfigRow]] = {"": []}  # keys without a table come first, as TOML wants
    for row in describe(cls):
        tables.setdefault(row.key.rpartition(".")[0], []).append(row)
    lines: list[str] = []
    for table, rows in tables.items():
        lines += [f"[{table}]"] if table else []
        for row in rows:
            name = row.key.rpartition(".")[2]
            lines += [f"# {row.doc} ({row.type})"] if row.doc else []
            required = row.default == "required"
            lines += [f"# {name} =   # required" if required else f"{name} = {row.default}", ""]
    return "\n".join(lines).strip() + "\n"


def _bounds(info: FieldInfo) -> str:
    signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    attributes = {"Ge": "ge", "Gt": "gt", "Le": "le", "Lt": "lt"}
    parts: list[str] = []
    for item in info.metadata:
        name = type(item).__name__
        if name in signs:
            parts.append(f" {signs[name]} {getattr(item, attributes[name])}")
    return ",".join(parts)
