"""Task sets: what there is to do, in a reproducible order, from memory, JSONL or Parquet.

Rows of a file flow in, `Task` objects flow out. Everything is checked while loading, so that a bad
line ends in one sentence before a run begins. This module knows no environment: what a row must hold
is said by the converter it is given.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from uni_agent.errors import MessageError, TaskFileError, UnknownNameError, UsageError, nearest
from uni_agent.types import Message, Task, derive_seed

TEST_SHARE = 0.1
"""Share of the tasks that `split("test")` holds when the tasks do not name their split themselves."""

Row = Mapping[str, Any]
Converter = Callable[[Row], Task]
"""One JSON object to a Task; raises TaskFileError saying what is wrong with it."""

T = TypeVar("T")


@runtime_checkable
class TaskSource(Protocol):
    """Where an environment's tasks come from: a TaskSet, or a class with two static methods."""

    def tasks(self, split: str | None, num: int, seed: int) -> TaskSet:
        """At most `num` tasks of a split, chosen and ordered by `seed`."""
        ...

    def task(self, task_id: str) -> Task:
        """The task of that id. Raises UnknownNameError."""
        ...


class TaskSet:
    """Tasks with unique ids, in a fixed order; never empty, never changed.

    `splits` names the split of each id, for all ids or for none; where there is none, ids are hashed
    into "train" and "test". Raises UsageError for no tasks and for an id used twice.
    """

    __slots__ = ("_splits", "_tasks")

    def __init__(self, tasks: Iterable[Task], splits: Mapping[str, str] | None = None) -> None:
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if task.id in self._tasks:
                raise UsageError(f"two tasks have the id {task.id!r}; ids must be unique within a task set")
            self._tasks[task.id] = task
        if not self._tasks:
            raise UsageError("a task set needs at least one task and got none")
        self._splits = dict(splits) if splits else None

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise UnknownNameError("task", task_id, self._tasks)
        return self._tasks[task_id]

    def task(self, task_id: str) -> Task:
        """The task of that id. Raises UnknownNameError with the nearest one."""
        return self[task_id]

    def tasks(self, split: str | None, num: int, seed: int) -> TaskSet:
        """At most `num` tasks of a split (None: of all), drawn without repeats by `seed`."""
        chosen = self if split is None else self.split(split)
        return chosen.shuffled(seed).first(num)

    def split(self, name: str, test_share: float = TEST_SHARE) -> TaskSet:
        """The tasks of one split, in order. Raises UsageError when there is no such split, or none in it.

        Without named splits there are "train" and "test": a task is in "test" when the hash of its id
        falls into the first `test_share` of all hashes, so it stays there when tasks come or go.
        """
        if self._splits is None:
            if name not in ("train", "test"):
                raise UsageError(f"unknown split {name!r}; {nearest(name, ('train', 'test'))}")
            chosen = [t for t in self if (_hash_share(t.id) < test_share) == (name == "test")]
        else:
            known = set(self._splits.values())
            if name not in known:
                raise UsageError(f"unknown split {name!r}; {nearest(name, known)}")
            chosen = [t for t in self if self._splits[t.id] == name]
        if not chosen:
            raise UsageError(f"split {name!r} holds none of the {len(self)} tasks; add tasks or name splits")
        return TaskSet(chosen, self._splits)

    def shuffled(self, seed: int) -> TaskSet:
        """The same tasks in an order drawn by `seed`."""
        tasks = list(self)
        random.Random(seed).shuffle(tasks)
        return TaskSet(tasks, self._splits)

    def first(self, num: int) -> TaskSet:
        """The first `num` tasks, or all where there are fewer. Raises UsageError for `num` below 1."""
        if num < 1:
            raise UsageError(f"asked for {num} tasks; ask for at least 1")
        return TaskSet(list(self)[:num], self._splits)

    def cycle(self, seed: int, start: int = 0) -> Iterator[Task]:
        """Yield tasks without end, each epoch a new order drawn from (seed, epoch).

        `start` is how many tasks a run has already taken: a resumed run passes it and goes on exactly
        where it stopped, also at the boundary of an epoch.
        """
        tasks = list(self)
        epoch, offset = divmod(start, len(tasks))
        while True:
            order = list(range(len(tasks)))
            random.Random(derive_seed(seed, "tasks", epoch)).shuffle(order)
            for index in order[offset:]:
                yield tasks[index]
            epoch, offset = epoch + 1, 0


def _hash_share(task_id: str) -> float:
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") / 2**64


# --- rows -----------------------------------------------------------------------------------------


def row_field(row: Row, key: str, kind: type[T]) -> T:
    """Take `key` out of a row. Raises TaskFileError when it is missing (with the nearest) or no `kind`."""
    if key not in row:
        close = difflib.get_close_matches(key, row, n=1)
        has = f"it has {', '.join(map(repr, row))}" if row else "it is empty"
        hint = f"; is {close[0]!r} meant to be {key!r}?" if close else ""
        raise TaskFileError(f"missing key {key!r} ({has}){hint}")
    value = row[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TaskFileError(f"{key!r} is {_describe(value)}; expected {_KINDS.get(kind, kind.__name__)}")
    return value


def task_from_json(row: Row) -> Task:
    """Make a Task from `id`, `prompt` (text, or a list of messages with `role` and `content`) and the rest.

    All other keys become `Task.data`, which the agent never sees. Raises TaskFileError.
    """
    task_id = row_field(row, "id", str)
    data = {key: value for key, value in row.items() if key not in ("id", "prompt")}
    return Task(task_id, prompt_messages(row), data)


def prompt_messages(row: Row) -> tuple[Message, ...]:
    """Read `prompt`: a text is one user message. Raises TaskFileError."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return (Message("user", row_field(row, "prompt", str)),)
    messages: list[Message] = []
    for number, entry in enumerate(cast("list[object]", prompt)):
        if not isinstance(entry, Mapping):
            raise TaskFileError(f"'prompt[{number}]' is {_describe(entry)}; expected a message object")
        fields = cast("Row", entry)
        try:
            messages.append(Message(cast("Any", row_field(fields, "role", str)), fields.get("content", "")))
        except (MessageError, TaskFileError) as error:
            raise TaskFileError(f"'prompt[{number}]': {error}") from None
    if not messages:
        raise TaskFileError("'prompt' is an empty list; expected at least one message")
    return tuple(messages)


_KINDS: Mapping[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


# --- files ----------------------------------------------------------------------------------------


def load_tasks(
    path: str | Path,
    *,
    convert: Converter = task_from_json,
    split: str | None = None,
    seed: int | None = None,
    limit: int | None = None,
) -> TaskSet:
    """Load a JSONL (`.jsonl`, `.ndjson`, `.json`) or Parquet (`.parquet`) file of tasks.

    A key `split` names the split of each row (of all rows or of none). `split` None takes all rows,
    `seed` None keeps the file's order, `limit` None takes all that are left. Raises TaskFileError
    naming the file, the line and what is wrong with it; also when no task is left.
    """
    path = Path(path)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    splits: dict[str, str] = {}
    for place, row in _rows(path):
        where = f"{path}, {place}"
        task = _convert(convert, row, where)
        if task.id in seen:
            raise TaskFileError(f"{where}: the id {task.id!r} is already used in {seen[task.id]}")
        if ("split" in row) != bool(splits) and tasks:
            raise TaskFileError(f"{where}: some rows have a key 'split' and some have none; name all or none")
        seen[task.id] = place
        tasks.append(task)
        if "split" in row:
            splits[task.id] = _split_name(row, where)
    if not tasks:
        raise TaskFileError(f"{path} holds no tasks; expected one JSON object (a task) per line")
    try:
        chosen = TaskSet(tasks, splits)
        chosen = chosen if split is None else chosen.split(split)
        chosen = chosen if seed is None else chosen.shuffled(seed)
        return chosen if limit is None else chosen.first(limit)
    except UsageError as error:
        raise TaskFileError(f"{path}: {error}") from None


def _split_name(row: Row, where: str) -> str:
    try:
        return row_field(row, "split", str)
    except TaskFileError as error:
        raise TaskFileError(f"{where}: {error}") from None


def _convert(convert: Converter, row: Row, where: str) -> Task:
    """Convert one row; whatever a user's converter raises becomes a sentence about that row."""
    try:
        return convert(row)
    except TaskFileError as error:
        raise TaskFileError(f"{where}: {error}") from None
    except KeyError as error:
        raise TaskFileError(f"{where}: missing key {error} (it has {', '.join(map(repr, row))})") from error
    except (TypeError, ValueError, MessageError) as error:
        raise TaskFileError(f"{where}: {error}") from error


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row with its place, such as "line 7"."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TaskFileError(f"task file {path} {what}; expected a .jsonl or .parquet file")
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return _json_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise TaskFileError(f"task file {path} ends in {path.suffix!r}; expected .jsonl or .parquet")


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value: object = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise TaskFileError(
                    f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8"
                ) from None
            except json.JSONDecodeError as error:
                raise TaskFileError(
                    f"{where}: not JSON ({error.msg}, column {error.colno}); expected one object per line"
                ) from None
            except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
                raise TaskFileError(f"{where}: cannot be read: {error}") from None
            if not text:
                continue
            if not isinstance(value, dict):
                raise TaskFileError(f"{where}: is {_describe(value)}; expected a JSON object")
            yield f"line {number}", cast("Row", value)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Absent values are null in Parquet: a null counts as a key that is not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a cell that Python cannot hold
        reason = str(error).partition("\n")[0]
        raise TaskFileError(f"task file {path} is not readable as Parquet: {reason}") from error
    for number, row in enumerate(rows, 1):
        yield f"row {number}", {key: value for key, value in row.items() if value is not None}
