"""The run directory `runs/<name>/`: everything that a run leaves behind, and the only thing viewers read.

config.toml  metrics.jsonl  spans.jsonl  summary.json  episodes/  checkpoints/  logs/
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, SupportsFloat

from uni_agent.config import BaseConfig, to_toml
from uni_agent.errors import UsageError, nearest
from uni_agent.track.jsonl import JsonlWriter, read_jsonl
from uni_agent.track.sinks import GuardedSink, Sink, check_tracker, open_tracker

logger = logging.getLogger(__name__)

_open_span: ContextVar[str | None] = ContextVar("open_span", default=None)


class Metrics(NamedTuple):
    """One row per step, in step order, and how many lines of the file were damaged.

    A step that was logged twice (training and evaluation, or again after a resume) is one row, in
    which later values win. A value that was not finite is None.
    """

    rows: list[dict[str, Any]]
    damaged: int


class Run:
    """One run's folder, open for writing. Use as a context manager; `create` makes one."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        """Open the folder's files; the folder itself must exist."""
        self.path = path
        self.nonfinite_values = 0
        for folder in (self.episodes_dir, self.checkpoints_dir, self.logs_dir):
            folder.mkdir(exist_ok=True)
        self.sinks = tuple(GuardedSink(sink) for sink in sinks)
        self._closed = False
        self._began = time.monotonic()
        self._metrics = JsonlWriter(path / "metrics.jsonl")
        self._spans = JsonlWriter(path / "spans.jsonl")
        self._texts = JsonlWriter(self.logs_dir / "texts.jsonl")
        self._handler = _log_to(self.logs_dir / "run.log")

    @classmethod
    def create(
        cls,
        recipe: str,
        config: BaseConfig,
        *,
        root: Path = Path("runs"),
        name: str | None = None,
        resume: bool = False,
        trackers: Sequence[str] = (),
    ) -> Run:
        """Make `root/name` (or `root/<recipe>-<date>-<n>`) with the resolved config in it.

        A folder with something in it is only touched with `resume`, which in turn needs one; the
        config it had is kept as `config-<n>.toml` where the new one differs. `trackers` are names of
        `sinks.TRACKERS`. Raises UsageError, MissingDependencyError.
        """
        for tracker in trackers:
            check_tracker(tracker)
        try:
            path = _resumed(root, name) if resume else _fresh(root, name, recipe)
        except OSError as error:
            raise UsageError(f"no run directory can be made in {root}: {error.strerror}") from error
        _save_config(path, to_toml(config))
        return cls(path, [open_tracker(tracker, path) for tracker in trackers])

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def episodes_dir(self) -> Path:
        return self.path / "episodes"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def sink_errors(self) -> int:
        """Failed and overlong calls of all sinks so far."""
        return sum(sink.errors for sink in self.sinks)

    def log(self, step: int, metrics: Mapping[str, SupportsFloat | None]) -> None:
        """Write one line of metrics. What is not finite becomes null and is counted."""
        values: dict[str, float | None] = {}
        nonfinite = 0
        for key, given in metrics.items():
            value = given if given is None or isinstance(given, int | float) else float(given)
            if value is not None and not math.isfinite(value):
                nonfinite += 1
                value = None
            values[key] = value
        if nonfinite:
            self.nonfinite_values += nonfinite
            values["track/nonfinite_values"] = nonfinite
        self._metrics.write({"step": step, "time_s": round(time.monotonic() - self._began, 3), **values})
        present = {key: value for key, value in values.items() if value is not None}
        for sink in self.sinks:
            sink.log(step, present)

    def log_text(self, step: int, key: str, text: str) -> None:
        """Keep a text whole in `logs/texts.jsonl`; sinks get it cleaned and capped."""
        self._texts.write({"step": step, "key": key, "text": text})
        for sink in self.sinks:
            sink.log_text(step, key, text)

    @contextmanager
    def span(self, name: str, step: int | None = None) -> Generator[None]:
        """Record how long the body took, within which other span, and the error that left it."""
        parent = _open_span.get()
        token = _open_span.set(name)
        began = time.monotonic()
        error: str | None = None
        try:
            yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            _open_span.reset(token)
            self._spans.write(
                {
                    "name": name,
                    "parent": parent,
                    "step": step,
                    "start_s": round(began - self._began, 6),
                    "duration_s": round(time.monotonic() - began, 6),
                    "error": error,
                }
            )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` whole or not at all; what is not finite becomes null."""
        text = json.dumps(plain_json(summary), indent=2, allow_nan=False) + "\n"
        _write_atomically(self.path / "summary.json", text)

    def close(self) -> None:
        """Close files and sinks; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for sink in self.sinks:
            sink.close()
        if self.sink_errors:
            logger.warning("trackers failed or were too slow %d times", self.sink_errors)
        for writer in (self._metrics, self._spans, self._texts):
            writer.close()
        logging.getLogger("uni_agent").removeHandler(self._handler)
        self._handler.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            logger.error("the run ended with %s: %s", type(error).__name__, error, exc_info=error)
        self.close()


def read_metrics(run_dir: Path) -> Metrics:
    """Read a run's metrics, damaged lines counted. Raises UsageError when it is no run directory."""
    if not (run_dir / "config.toml").exists():
        raise UsageError(f"{run_dir} is not a run directory (it has no config.toml)")
    records, damaged = read_jsonl(run_dir / "metrics.jsonl")
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        rows.setdefault(int(record["step"]), {}).update(record)
    return Metrics([rows[step] for step in sorted(rows)], damaged)


def _fresh(root: Path, name: str | None, recipe: str) -> Path:
    """Make an empty folder that was not there, or was empty."""
    if name is None:
        root.mkdir(parents=True, exist_ok=True)
        taken = 1
        while True:
            path = root / f"{recipe}-{date.today():%Y%m%d}-{taken}"
            try:
                path.mkdir()
            except FileExistsError:
                taken += 1
            else:
                return path
    path = root / name
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(
            f"run directory {path} exists and is not empty; choose another name, or resume that run"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def _resumed(root: Path, name: str | None) -> Path:
    """Find the folder of a run that goes on."""
    if name is None:
        raise UsageError("to resume, name the run")
    path = root / name
    if not (path / "config.toml").is_file():
        runs = [folder.parent.name for folder in root.glob("*/config.toml")]
        raise UsageError(f"there is no run to resume in {path}; {nearest(name, runs)}")
    return path


def _save_config(path: Path, text: str) -> None:
    target = path / "config.toml"
    if target.exists() and target.read_text(encoding="utf-8") != text:
        kept = 1
        while (path / f"config-{kept}.toml").exists():
            kept += 1
        target.rename(path / f"config-{kept}.toml")
    _write_atomically(target, text)


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a crash leaves either the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def plain_json(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are not finite are null, paths are strings."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(below) for below in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _log_to(path: Path) -> logging.Handler:
    """Send the package's log records to a file, INFO and above."""
    # a surrogate in a model's output must not make the log raise
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("uni_agent")
    package.addHandler(handler)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    return handler
