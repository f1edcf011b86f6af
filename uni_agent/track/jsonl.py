"""JSON lines that survive several writers and crashes.

Each record is one line of ASCII, written under a lock in one append. A writer that died in the
middle of a record leaves a fragment; the next writer ends that line, so the fragment stays one
damaged line of its own, which readers count.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple


class Records(NamedTuple):
    """What a file holds: the records in order, and how many lines were damaged."""

    records: list[dict[str, Any]]
    damaged: int


class JsonlWriter:
    """Append records to one file; safe for threads and for processes on one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; it is with the operating system when this returns.

        Lone surrogates and control characters are escaped, never lost. Raises ValueError for NaN.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode("ascii")
        with self._lock:
            # the file lock is for other processes: flock belongs to the open file, not to a thread
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                size = os.fstat(self._fd).st_size
                if size and os.pread(self._fd, 1, size - 1) != b"\n":
                    line = b"\n" + line
                view = memoryview(line)
                while view:
                    view = view[os.write(self._fd, view) :]
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: Path) -> Records:
    """Read all whole records; a damaged line is counted and skipped. A missing file has none."""
    records: list[dict[str, Any]] = []
    damaged = 0
    if not path.exists():
        return Records(records, damaged)
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return Records(records, damaged)
