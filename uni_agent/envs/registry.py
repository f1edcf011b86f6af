"""The one registry: environments by the names that users write in files and calls.

A name resolves to a class, which is imported when first needed. Beside the `Environment` protocol a
class may offer, as static or class methods: `tasks` and `task` (see `TaskSource`), `task_from_json`
(see `ReadsTasks`) and `with_max_steps` (see `StepLimited`). Nothing is looked for beyond these.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, cast, runtime_checkable

from uni_agent.envs.tasks import Row, TaskSet, TaskSource, load_tasks, task_from_json
from uni_agent.errors import UnknownNameError, UsageError, nearest
from uni_agent.protocols import Environment
from uni_agent.types import Task

EntryPoint = str | Callable[[], Environment]
"""A class (or a function that makes a world), or where it is: "package.module.Class"."""


@runtime_checkable
class ReadsTasks(Protocol):
    """An environment class that says what a row of its task files must hold."""

    def task_from_json(self, row: Row) -> Task:
        """Raises TaskFileError."""
        ...


@runtime_checkable
class StepLimited(Protocol):
    """An environment class whose world itself ends after the registered number of steps."""

    def with_max_steps(self, max_steps: int) -> Environment: ...


@runtime_checkable
class _World(Environment, Protocol):
    """Environment, checkable at run time."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is known about a name. `max_steps` limits the agent's turns; None sets no limit.

    `task_set` is a TaskSource or the place of one ("package.module.name"); None takes the tasks that
    the environment class offers.
    """

    name: str
    entry_point: EntryPoint
    max_steps: int | None = None
    task_set: TaskSource | str | None = None


BUILT_IN = {
    "code_debug_env": EnvSpec("code_debug_env", "uni_agent.envs.CodeDebugEnv", max_steps=5),
    "calculator_env": EnvSpec("calculator_env", "uni_agent.envs.CalculatorEnv", max_steps=6),
}
"""Known without registering."""


class EnvRegistry:
    """Environments by name. Registering imports nothing; the first use does."""

    _registered: ClassVar[dict[str, EnvSpec]] = {}

    @classmethod
    def register(
        cls,
        *,
        name: str,
        entry_point: EntryPoint,
        max_steps: int | None = None,
        task_set: TaskSource | str | None = None,
        replace: bool = False,
    ) -> None:
        """Make an environment known under `name`.

        The same values again change nothing; other values raise UsageError unless `replace`. A
        built-in name takes other settings, but another class only with `replace`.
        """
        if not name:
            raise UsageError("an environment needs a name; got an empty one")
        if max_steps is not None and max_steps < 1:
            raise UsageError(f"environment {name!r}: max_steps is {max_steps}; expected at least 1, or None")
        if isinstance(entry_point, str) and not all(entry_point.rpartition(".")[::2]):
            raise UsageError(
                f"environment {name!r}: entry point {entry_point!r} names no module; expected "
                "'package.module.Class', or the class itself"
            )
        new = EnvSpec(name, entry_point, max_steps, task_set)
        if not replace:
            _refuse_other_values(new, cls._registered.get(name), BUILT_IN.get(name))
        cls._registered[name] = new

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All known names, sorted."""
        return tuple(sorted({*BUILT_IN, *cls._registered}))

    @classmethod
    def spec(cls, name: str) -> EnvSpec:
        """What is known about a name. Raises UnknownNameError with the nearest name."""
        spec = cls._registered.get(name) or BUILT_IN.get(name)
        if spec is None:
            raise UnknownNameError("environment", name, cls.names())
        return spec

    @classmethod
    def make(cls, name: str) -> Environment:
        """Make a fresh world, to be used for one episode. Raises UsageError when it cannot be made."""
        spec = cls.spec(name)
        maker = _maker(spec)
        limited: object = maker
        try:
            if isinstance(limited, StepLimited) and spec.max_steps is not None:
                world: object = limited.with_max_steps(spec.max_steps)
            else:
                world = maker()
        except TypeError as error:
            raise UsageError(
                f"environment {name!r} cannot be made without arguments: {error}; give defaults, or "
                "register a functools.partial"
            ) from error
        if not isinstance(world, _World):
            raise UsageError(
                f"environment {name!r}: {type(world).__name__} is no environment; it needs the async "
                "methods reset(task), step(message, tool_results) and close()"
            )
        return world

    @classmethod
    def source(cls, name: str) -> TaskSource:
        """Where the environment's tasks come from. Raises UsageError when it has none."""
        spec = cls.spec(name)
        found: object = spec.task_set if spec.task_set is not None else _maker(spec)
        if isinstance(found, str):
            found = _import(found, f"environment {name!r}: task set")
        if not isinstance(found, TaskSource):
            raise UsageError(
                f"environment {name!r} has no task set; pass Task objects or a task file, or register it "
                "with task_set=TaskSet(...)"
            )
        return found

    @classmethod
    def resolve(cls, name: str, tasks: Iterable[str | Task]) -> list[Task]:
        """Turn task ids into the environment's tasks; Task objects stay. Raises UnknownNameError."""
        return [task if isinstance(task, Task) else cls.source(name).task(task) for task in tasks]

    @classmethod
    def load_tasks(
        cls,
        name: str,
        path: str | Path,
        *,
        split: str | None = None,
        seed: int | None = None,
        limit: int | None = None,
    ) -> TaskSet:
        """Load a task file in the environment's own form, as `envs.tasks.load_tasks` does."""
        maker: object = _maker(cls.spec(name))
        convert = maker.task_from_json if isinstance(maker, ReadsTasks) else task_from_json
        return load_tasks(path, convert=convert, split=split, seed=seed, limit=limit)


def _refuse_other_values(new: EnvSpec, old: EnvSpec | None, built_in: EnvSpec | None) -> None:
    known = old or built_in
    if known is None:
        return
    changed: list[str] = []
    if new.entry_point != known.entry_point and _maker(new) is not _maker(known):
        changed.append(f"entry_point {known.entry_point!r} (now {new.entry_point!r})")
    if old is not None and new.max_steps != old.max_steps:
        changed.append(f"max_steps {old.max_steps} (now {new.max_steps})")
    if old is not None and new.task_set != old.task_set:
        changed.append("another task_set")
    if changed:
        raise UsageError(
            f"environment {new.name!r} is already registered with {' and '.join(changed)}; choose another "
            "name, or pass replace=True"
        )


def _maker(spec: EnvSpec) -> Callable[[], Environment]:
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    found = _import(spec.entry_point, f"environment {spec.name!r}: entry point")
    if not callable(found):
        raise UsageError(
            f"environment {spec.name!r}: entry point {spec.entry_point!r} is {type(found).__name__}; "
            "expected a class"
        )
    return cast("Callable[[], Environment]", found)


def _import(place: str, what: str) -> object:
    """Import "package.module.name". Raises UsageError in one line, whatever the module does."""
    module_name, _, attribute = place.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"{what} {place!r} does not import: {type(error).__name__}: {error}; check the spelling and "
            "that the package is installed or in PYTHONPATH"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UsageError(
            f"{what} {place!r}: module {module_name!r} has no {attribute!r}; {nearest(attribute, public)}"
        ) from None
