"""What a config class looks like from outside: its keys, their types, their defaults."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class BaseConfig(BaseModel):
    """Base of every config class and nested table: frozen, strict, unknown keys are errors.

    A docstring under a field is its documentation. `renamed` maps a dotted key that was once valid
    to its new name, so that an old file gets told.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    renamed: ClassVar[Mapping[str, str]] = {}


UNKNOWN = object()


def options_of(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, unions and Annotated opened: `int | None` is [int, None]."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in options_of(part)]
    return [annotation]


def tables_of(annotation: Any) -> list[type[BaseModel]]:
    """The config classes among the alternatives; none for a plain value."""
    return [part for part in options_of(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]


def annotation_of(parent: Any, key: str) -> Any:
    """The annotation of `key` inside a table or dict annotation; UNKNOWN where there is none."""
    for option in options_of(parent):
        if isinstance(option, type) and issubclass(option, BaseModel) and key in option.model_fields:
            return option.model_fields[key].annotation
        if get_origin(option) is dict:
            return get_args(option)[1]
    return UNKNOWN


def item_annotation(options: Sequence[Any]) -> Any:
    """The annotation of a list's or tuple's items; UNKNOWN where no option is one."""
    for option in options:
        if get_origin(option) in (list, tuple, set, frozenset):
            return get_args(option)[0]
    return UNKNOWN


class Key(NamedTuple):
    """One key of a config class: its dotted name, and the default in force."""

    name: str
    info: FieldInfo
    default: Any  # UNKNOWN where the key is required
    is_table: bool


def keys_of(cls: type[BaseModel], prefix: str = "", parent: Any = None) -> Iterator[Key]:
    """Every dotted key in the order of the class, tables and what is in them. A default is the one
    in force: a table's own default instance counts before the table's class."""
    for name, info in cls.model_fields.items():
        default: Any = UNKNOWN
        if isinstance(parent, cls):
            default = getattr(parent, name)
        elif not info.is_required():
            default = info.get_default(call_default_factory=True)
        below = tables_of(info.annotation)
        yield Key(prefix + name, info, default, bool(below))
        for table in below:
            yield from keys_of(table, f"{prefix}{name}.", default)


def type_name(annotation: Any) -> str:
    """An annotation in a reader's words: `int | none`, `list[str]`, `"a" | "b"`."""
    names: list[str] = []
    for option in options_of(annotation):
        if option is types.NoneType:
            names.append("none")
        elif get_origin(option) is Literal:
            names += [json.dumps(choice) for choice in get_args(option)]
        elif get_origin(option) is not None:
            parts = get_args(option)
            if parts[-1:] == (Ellipsis,):  # a tuple of any length, which TOML and flags write as a list
                names.append(f"list[{type_name(parts[0])}]")
            else:
                names.append(f"{get_origin(option).__name__}[{', '.join(map(type_name, parts))}]")
        else:
            names.append(getattr(option, "__name__", str(option)))
    return " | ".join(names)


def has_surrogate(text: str) -> bool:
    """Whether a text holds lone surrogates, which no UTF-8 file can."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)
