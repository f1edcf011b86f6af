"""One Parquet file of episodes: a row per episode, token arrays as lists, the rest as JSON text.

The plain columns (id, group, task, end, reward, ...) are for queries by other programs; `record` and
`task` hold the exact Episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from uni_agent.errors import RunError
from uni_agent.rollout.record import Array, Tokens, dump_episode, dump_task, load_episode, load_task
from uni_agent.types import Episode, Task, Trajectory

FORMAT = b"1"
_ROW_GROUP = 256
_ARRAYS = ("token_ids", "sampled", "logprobs", "versions")
_DTYPES = (np.int32, np.bool_, np.float32, np.int32)


class IndexRow(NamedTuple):
    """What the index keeps of one episode."""

    id: str
    group_id: str | None
    task_id: str
    end: str
    reward: float | None
    num_turns: int
    num_sampled: int
    error: str | None


def printable(text: str) -> str:
    """The text with lone surrogates escaped: Parquet strings are UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_segment(path: Path, rows: Sequence[tuple[str | None, Episode]]) -> None:
    """Write episodes, each with the id of its group or None, in this order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys = [_index_row(group_id, episode) for group_id, episode in rows]
    columns: dict[str, Any] = {
        name: pa.array([key[place] for key in keys], kind)
        for place, (name, kind) in enumerate(
            {
                "id": pa.string(),
                "group_id": pa.string(),
                "task_id": pa.string(),
                "end": pa.string(),
                "reward": pa.float64(),
                "num_turns": pa.int32(),
                "num_sampled": pa.int64(),
                "error": pa.string(),
            }.items()
        )
    }
    columns["group_key"] = pa.array(
        [None if group_id is None else group_id.encode("utf-8", "surrogatepass") for group_id, _ in rows],
        pa.binary(),
    )
    columns["record"] = pa.array([dump_episode(episode) for _, episode in rows], pa.string())
    columns["task"] = pa.array([dump_task(episode.task) for _, episode in rows], pa.string())
    columns["artifacts"] = pa.array(
        [list(episode.artifacts.values()) for _, episode in rows], pa.list_(pa.binary())
    )
    episodes = [episode for _, episode in rows]
    for name, dtype in zip(_ARRAYS, _DTYPES, strict=True):
        columns[name] = _nested(episodes, name, dtype)
    table = pa.table(columns).replace_schema_metadata({b"uni_agent.format": FORMAT})
    pq.write_table(table, path, compression="zstd", row_group_size=_ROW_GROUP)


def read_index_rows(path: Path) -> list[IndexRow]:
    """Read the columns that the index needs. Raises RunError when the file is damaged."""
    table = _read(path, columns=list(IndexRow._fields))
    return [IndexRow(**row) for row in table.to_pylist()]


def read_episodes(path: Path, row: int | None = None) -> list[tuple[str | None, Episode]]:
    """Read all episodes with the ids of their groups, or only the one in `row`.

    Raises RunError when the file is damaged.
    """
    table = _read(path, row=row)
    tokens = _tokens(table)
    tasks: dict[str, Task] = {}
    found: list[tuple[str | None, Episode]] = []
    wanted = ("group_key", "record", "task", "artifacts")
    for index, (group, record, task, artifacts) in enumerate(
        zip(*(table.column(name).to_pylist() for name in wanted), strict=True)
    ):
        if task not in tasks:
            tasks[task] = load_task(task)
        group_id = None if group is None else group.decode("utf-8", "surrogatepass")
        found.append((group_id, load_episode(record, tasks[task], tokens[index], artifacts)))
    return found


def _read(path: Path, *, columns: Sequence[str] | None = None, row: int | None = None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if row is None:
                return file.read(columns=columns)
            table = file.read_row_group(row // _ROW_GROUP, columns=columns)
            return table.slice(row % _ROW_GROUP, 1)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise RunError(
            f"episodes file {path} cannot be read ({reason}); remove it, the other steps stay readable"
        ) from error


def _index_row(group_id: str | None, episode: Episode) -> IndexRow:
    return IndexRow(
        id=printable(episode.id),
        group_id=None if group_id is None else printable(group_id),
        task_id=printable(episode.task.id),
        end=episode.end,
        reward=episode.reward,
        num_turns=episode.num_turns,
        num_sampled=sum(int(trajectory.sampled.sum()) for trajectory in episode.trajectories),
        error=None if episode.error is None else printable(episode.error.partition("\n")[0]),
    )


def _nested(episodes: Sequence[Episode], name: str, dtype: type) -> Any:
    """list<list<dtype>>: episode, trajectory, token."""
    import pyarrow as pa

    trajectories: list[Trajectory] = [t for episode in episodes for t in episode.trajectories]
    parts = [np.asarray(getattr(trajectory, name), dtype) for trajectory in trajectories]
    values = np.concatenate(parts) if parts else np.zeros(0, dtype)
    inner = pa.ListArray.from_arrays(_offsets(len(part) for part in parts), pa.array(values))
    return pa.ListArray.from_arrays(_offsets(len(episode.trajectories) for episode in episodes), inner)


def _offsets(lengths: Iterable[int]) -> Any:
    import pyarrow as pa

    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _tokens(table: Any) -> list[list[Tokens]]:
    """The arrays of every trajectory of every row; each is a copy of its own."""
    found: list[list[list[Array]]] = [[] for _ in range(table.num_rows)]
    for name in _ARRAYS:
        row = 0
        for outer in table.column(name).chunks:
            inner = outer.values
            values = cast("Array", inner.values.to_numpy(zero_copy_only=False))
            ends = cast("Array", inner.offsets.to_numpy())
            for first, last in zip(
                outer.offsets[:-1].to_pylist(), outer.offsets[1:].to_pylist(), strict=True
            ):
                found[row].append([values[ends[i] : ends[i + 1]].copy() for i in range(first, last)])
                row += 1
    return [[Tokens(*arrays) for arrays in zip(*row, strict=True)] for row in found]
