"""The episodes of a run on disk: one Parquet segment per step, and an index that can be rebuilt.

A segment is whole or absent: it is written under another name and renamed. Reading needs nothing but
the run's folder. The index (SQLite) only makes finding fast; when it is missing, damaged or behind,
it is made again from the segments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from uni_agent.errors import RunError, UnknownNameError, UsageError
from uni_agent.rollout.segment import IndexRow, printable, read_episodes, read_index_rows, write_segment
from uni_agent.types import Episode, Group

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<split>[a-z0-9_]+)-(?P<step>\d{6,})\.parquet")
_SCHEMA_VERSION = 1
_SCHEMA = """
DROP TABLE IF EXISTS segments;
DROP TABLE IF EXISTS episodes;
CREATE TABLE segments (name TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER);
CREATE TABLE episodes (
    segment TEXT, row INTEGER, split TEXT, step INTEGER, id TEXT, group_id TEXT, task_id TEXT,
    ended TEXT, reward REAL, num_turns INTEGER, num_sampled INTEGER, error TEXT,
    PRIMARY KEY (segment, row)
);
CREATE INDEX episodes_by_id ON episodes (id);
"""
_COLUMNS = "split, step, id, group_id, task_id, ended, reward, num_turns, num_sampled, error"


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One line of the index; `error` is the first line of the error's text.

    Characters that are not valid Unicode are escaped here; the Episode itself has them as they were.
    """

    split: str
    step: int
    id: str
    group_id: str | None
    task_id: str
    end: str
    reward: float | None
    num_turns: int
    num_sampled: int
    error: str | None


class EpisodeStore:
    """Reads and writes `episodes/` of a run directory. Not for several writers of one step.

    `split` keeps training episodes apart from those of an evaluation at the same step.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.folder = Path(run_dir) / "episodes"

    def write(self, step: int, items: Iterable[Group | Episode], *, split: str = "train") -> Path:
        """Write the segment of a step, replacing one that is there; return its path.

        Blocks on the disk: call it in a thread where an event loop runs. Lone episodes (lost
        attempts, an evaluation's) have no group.
        """
        if not re.fullmatch(r"[a-z0-9_]+", split) or step < 0:
            raise UsageError(
                f"split {split!r}, step {step}: expected a name of a-z, 0-9, _ and a step from 0"
            )
        rows: list[tuple[str | None, Episode]] = []
        for item in items:
            rows += [(item.id, e) for e in item.episodes] if isinstance(item, Group) else [(None, item)]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(step, split)
        for leftover in self.folder.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)
        temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
        try:
            write_segment(temporary, rows)
            _sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self.folder)
        with self._index():
            pass
        return path

    def read(self, step: int, *, split: str = "train") -> list[Episode]:
        """Read all episodes of a step, in the order in which they were written."""
        return [episode for _, episode in self._read(step, split)]

    def read_groups(self, step: int, *, split: str = "train") -> list[Group]:
        """Read the groups of a step; episodes without a group are left out."""
        groups: dict[str, list[Episode]] = {}
        for group_id, episode in self._read(step, split):
            if group_id is not None:
                groups.setdefault(group_id, []).append(episode)
        return [Group(group_id, tuple(episodes)) for group_id, episodes in groups.items()]

    def get(self, episode_id: str, *, split: str | None = None) -> Episode:
        """Read one episode. Of several with the same id, training's comes first, then the latest.

        Raises UnknownNameError when there is none.
        """
        wanted = printable(episode_id)
        query = (
            "SELECT segment, row FROM episodes WHERE id = ? AND (? IS NULL OR split = ?) "
            "ORDER BY split = 'train' DESC, step DESC LIMIT 1"
        )
        with self._index() as index:
            found = index.execute(query, (wanted, split, split)).fetchone()
            if found is None:
                known = [row[0] for row in index.execute("SELECT id FROM episodes")]
                raise UnknownNameError("episode", episode_id, known)
        segment, row = found
        return read_episodes(self.folder / segment, row)[0][1]

    def find(
        self, *, step: int | None = None, split: str | None = None, end: str | None = None, limit: int = -1
    ) -> list[EpisodeRow]:
        """List what is there, ordered by split, step and place; None and -1 mean any and all."""
        query = (
            f"SELECT {_COLUMNS} FROM episodes WHERE (? IS NULL OR step = ?) AND (? IS NULL OR split = ?) "
            "AND (? IS NULL OR ended = ?) ORDER BY split DESC, step, row LIMIT ?"
        )
        with self._index() as index:
            rows = index.execute(query, (step, step, split, split, end, end, limit)).fetchall()
        return [EpisodeRow(*row) for row in rows]

    def steps(self, *, split: str = "train") -> list[int]:
        """Steps that have a segment, in order."""
        return sorted(step for _, (name, step) in self._segments() if name == split)

    def _path(self, step: int, split: str) -> Path:
        return self.folder / f"{split}-{step:06d}.parquet"

    def _segments(self) -> Iterator[tuple[Path, tuple[str, int]]]:
        for path in sorted(self.folder.glob("*.parquet")):
            found = _NAME.fullmatch(path.name)
            if found is not None:
                yield path, (found["split"], int(found["step"]))

    def _read(self, step: int, split: str) -> list[tuple[str | None, Episode]]:
        path = self._path(step, split)
        if not path.exists():
            steps = self.steps(split=split)
            there = f"there are {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "there are none"
            raise UsageError(f"no {split} episodes of step {step} in {self.folder}; {there}")
        return read_episodes(path)

    @contextlib.contextmanager
    def _index(self) -> Generator[sqlite3.Connection]:
        """Open the index, brought up to date; in memory where the folder cannot be written."""
        path = self.folder / "index.sqlite"
        try:
            index = self._opened(str(path))
        except sqlite3.OperationalError:  # read-only, missing folder, or held by another process
            index = self._opened(":memory:")
        except sqlite3.DatabaseError as error:
            log.warning("index %s is damaged (%s); it is made again from the segments", path, error)
            path.unlink(missing_ok=True)
            index = self._opened(str(path))
        try:
            yield index
        finally:
            index.close()

    def _opened(self, path: str) -> sqlite3.Connection:
        index = sqlite3.connect(path, timeout=10.0)
        try:
            with index:
                if index.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
                    index.executescript(f"{_SCHEMA}PRAGMA user_version = {_SCHEMA_VERSION};")
                self._update(index)
        except BaseException:
            index.close()
            raise
        return index

    def _update(self, index: sqlite3.Connection) -> None:
        known = {name: tuple(stamp) for name, *stamp in index.execute("SELECT * FROM segments")}
        there = dict(self._segments())
        for path, (split, step) in there.items():
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if known.pop(path.name, None) == stamp:
                continue
            _forget(index, path.name)
            try:
                rows = read_index_rows(path)
            except RunError as error:
                log.warning("%s", error)
                continue
            index.execute("INSERT INTO segments VALUES (?, ?, ?)", (path.name, *stamp))
            _insert(index, path.name, split, step, rows)
        for name in known:
            _forget(index, name)


def _forget(index: sqlite3.Connection, name: str) -> None:
    index.execute("DELETE FROM segments WHERE name = ?", (name,))
    index.execute("DELETE FROM episodes WHERE segment = ?", (name,))


def _insert(index: sqlite3.Connection, name: str, split: str, step: int, rows: Sequence[IndexRow]) -> None:
    marks = ", ".join("?" * 12)
    index.executemany(
        f"INSERT INTO episodes VALUES ({marks})",
        [(name, place, split, step, *row) for place, row in enumerate(rows)],
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
