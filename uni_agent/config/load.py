"""TOML files and dotted flags, merged, typed and validated; every mistake explained.

Both sources mean the same: a TOML value keeps its type, a flag's text is read as the field's type.
`1e5` is an integer where the field is one; a quoted number in TOML is a mistake; `none` is None for
a field that allows it (TOML has no null).
"""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from uni_agent.config.shape import (
    UNKNOWN,
    BaseConfig,
    annotation_of,
    has_surrogate,
    item_annotation,
    keys_of,
    options_of,
    tables_of,
    type_name,
)
from uni_agent.errors import ConfigError, nearest

Config = TypeVar("Config", bound=BaseConfig)
KeyPath = tuple[str | int, ...]

_INTEGER = re.compile(r"[+-]?\d(_?\d){0,99}")
_TOML_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")


@dataclass(slots=True)
class _Layers:
    """What files and flags say, merged; where each key came from; what was wrong with them."""

    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    origin: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    errors: list[str] = field(default_factory=list[str])

    def merge(self, layer: Mapping[str, Any], source: str) -> None:
        """Lay a TOML document over what is there; tables merge, values replace."""

        def lay(target: dict[str, Any], over: Mapping[str, Any], path: KeyPath) -> None:
            for key, value in over.items():
                here = (*path, key)
                self.origin[here] = source
                if isinstance(value, dict):
                    below = target.get(key)
                    target[key] = below if isinstance(below, dict) else {}
                    lay(target[key], typing.cast("dict[str, Any]", value), here)
                else:
                    target[key] = value

        lay(self.tree, layer, ())

    def put(self, path: Sequence[str], value: Any, source: str) -> None:
        """Set one key."""
        nested: dict[str, Any] = {path[-1]: value}
        for part in reversed(path[:-1]):
            nested = {part: nested}
        self.merge(nested, source)


def load_config(cls: type[Config], argv: Sequence[str]) -> Config:
    """Read `@ file.toml` references, then dotted flags on top of them, wherever they stand.

    Flags are `--key value` or `--key=value`; a bare `--key` sets a boolean; dashes in keys count as
    underscores; lists are TOML arrays or words joined by commas. Raises ConfigError.
    """
    layers = _Layers()
    files, flags = _split_argv(argv, cls, layers.errors)
    for path in files:
        try:
            layers.merge(read_toml(path), path)
        except ConfigError as error:
            layers.errors.append(str(error))
    for flag, text in flags:
        _lay_flag(cls, flag, text, layers)
    tree = {key: _typed(annotation_of(cls, key), value) for key, value in layers.tree.items()}
    try:
        config = cls.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as invalid:
        where = ", ".join(files) or "configuration"
        for problem in invalid.errors(include_url=False):
            layers.errors.append(_explain(cls, typing.cast("dict[str, Any]", problem), layers.origin, where))
    else:
        if not layers.errors:
            return config
    if len(layers.errors) == 1:
        raise ConfigError(layers.errors[0])
    raise ConfigError(f"{len(layers.errors)} mistakes in the configuration:\n  " + "\n  ".join(layers.errors))


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError naming file and line."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}); config files are TOML text") from None
    except tomllib.TOMLDecodeError as error:
        line = _TOML_LINE.search(str(error))
        place = f"{path}:{line[1]}" if line and line[1] else str(path)
        raise ConfigError(f"{place}: not valid TOML: {_TOML_LINE.sub('', str(error)).strip()}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _split_argv(
    argv: Sequence[str], cls: type[BaseConfig], errors: list[str]
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Sort arguments into files and (key, text) flags; text None is a bare flag."""
    files: list[str] = []
    flags: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            name = word[1:] or (rest.pop(0) if rest else "")
            if name:
                files.append(name)
            else:
                errors.append("@ must be followed by a TOML file")
        elif word.startswith("--") and len(word) > 2:
            key, equals, text = word[2:].partition("=")
            if equals:
                flags.append((key, text))
            elif rest and not rest[0].startswith(("--", "@")):
                flags.append((key, rest.pop(0)))
            else:
                flags.append((key, None))
        else:
            errors.append(f"unexpected argument {word!r}; expected `@ file.toml` or `--key value`")
    return files, flags


def _lay_flag(cls: type[BaseConfig], key: str, text: str | None, layers: _Layers) -> None:
    """Resolve one flag against the class and lay its value on top, or note what is wrong."""
    source = f"--{key}"
    path = key.replace("-", "_").split(".")
    if not all(path):
        name = ".".join(part for part in path if part)
        layers.errors.append(f"{source}: the key has an empty part; {_suggest(cls, name)}")
        return
    found: Any = cls
    for part in path:
        found = annotation_of(found, part)
    tables = tables_of(found)
    name = ".".join(path)
    if found is UNKNOWN:
        layers.errors.append(f"{source}: unknown key {name!r}; {_suggest(cls, name)}")
    elif tables and not (text or "").startswith(("{", "none", "None")):
        keys = ", ".join(f"--{name}.{sub}" for sub in tables[0].model_fields)
        layers.errors.append(f"{source}: {name!r} is a table; set one of {keys}")
    elif text is None and bool not in options_of(found):
        layers.errors.append(f"{source}: needs a value ({type_name(found)})")
    elif text is not None and not text.isprintable() and has_surrogate(text):
        layers.errors.append(f"{source}: the value is not valid UTF-8")
    else:
        layers.put(path, True if text is None else _from_text(found, text), source)


def _from_text(annotation: Any, text: str) -> Any:
    """Read a flag's text as the field's type; text that does not fit stays text and fails later."""
    options = options_of(annotation)
    if types.NoneType in options and text.lower() == "none":
        return None
    for option in options:
        if get_origin(option) is Literal:
            for choice in get_args(option):
                if str(choice) == text:
                    return choice
    item = item_annotation(options)
    if text.startswith(("[", "{")) and str not in options:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return text
    if item is not UNKNOWN:
        return [_from_text(item, part.strip()) for part in text.split(",") if part.strip()]
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in options and _INTEGER.fullmatch(text):
        return int(text)
    if float in options or int in options:
        try:
            return _typed(annotation, float(text))
        except ValueError:
            return text
    return text


def _typed(annotation: Any, value: Any) -> Any:
    """Let `1e5` be an integer and `none` be None where the field asks for it; all else stays."""
    options = options_of(annotation)
    if isinstance(value, dict):
        table = typing.cast("dict[str, Any]", value)
        return {key: _typed(annotation_of(annotation, key), below) for key, below in table.items()}
    if isinstance(value, list):
        item = item_annotation(options)
        return [_typed(item, below) for below in typing.cast("list[Any]", value)]
    if isinstance(value, str) and value.lower() == "none" and types.NoneType in options:
        return None
    if isinstance(value, float) and value.is_integer() and int in options and float not in options:
        return int(value)
    return value


def _explain(
    cls: type[BaseConfig], problem: Mapping[str, Any], origin: Mapping[KeyPath, str], where: str
) -> str:
    """One line for one pydantic error: source, key, what came, what was expected, what to do."""
    loc: KeyPath = problem["loc"]
    # pydantic puts the name of a union's member into the path; no file or flag contains it
    keys = [str(part) for part in loc if not isinstance(part, int)]
    key = ".".join(keys)
    source = next((origin[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in origin), where)
    kind, message, given = problem["type"], str(problem["msg"]), problem["input"]
    if kind == "extra_forbidden":
        return f"{source}: unknown key {key!r}; {_suggest(cls, key)}"
    if kind == "missing":
        found: Any = cls
        for part in keys:
            found = annotation_of(found, part)
        return f"{where}: key {key!r} is missing ({type_name(found)})"
    if kind == "value_error":
        about = f"{key}: " if key else ""
        return f"{source}: {about}{message.removeprefix('Value error, ')}"
    expected = message.removeprefix("Input ").replace("dictionary or an instance of", "table,")
    shown = given if isinstance(given, str | int | float) else type(given).__name__
    hint = ""
    if isinstance(given, str) and kind in ("int_type", "float_type", "bool_type"):
        hint = "" if source.startswith("--") else "; write it without quotes"
    return f"{source}: {key!r} {expected}, got {shown!r}{hint}"


def _suggest(cls: type[BaseConfig], key: str) -> str:
    """Say which key was meant: a renamed one, a sibling, the same name elsewhere, or the nearest."""
    if key in cls.renamed:
        return f"it was renamed to {cls.renamed[key]!r}"
    known = [found.name for found in keys_of(cls)]
    table, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == table]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    close = get_close_matches(key, siblings, n=1, cutoff=0.6) or get_close_matches(
        key, known, n=1, cutoff=0.6
    )
    if not close:
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = [by_last[name] for name in get_close_matches(last, by_last, n=1, cutoff=0.75)]
    return f"did you mean {close[0]!r}?" if close else nearest(key, siblings or known)
