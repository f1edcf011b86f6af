"""Optional places for metrics beside the run directory: TensorBoard, Weights & Biases.

A sink is a guest: it works in a thread of its own, and one that raises, blocks or falls behind is
counted and never felt by training. The run directory has everything anyway.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from uni_agent.errors import MissingDependencyError, UnknownNameError
from uni_agent.track.text import clean_text

logger = logging.getLogger(__name__)

TEXT_LIMIT = 20_000
"""Characters of one text that a sink gets; the run directory keeps it whole."""


class Sink(Protocol):
    """Takes metrics and texts; may be slow and may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_text(self, step: int, key: str, text: str) -> None: ...

    def close(self) -> None: ...


class GuardedSink:
    """Run a sink in a daemon thread, behind a queue of bounded length.

    `errors` counts calls that raised or took longer than `timeout_s`; `dropped` counts what was
    never handed over because the queue was full or the sink was stuck at the end.
    """

    def __init__(self, sink: Sink, *, timeout_s: float = 10.0, queue_size: int = 1000) -> None:
        self.name = type(sink).__name__
        self.dropped = 0
        self._sink = sink
        self._timeout_s = timeout_s
        self._raised = 0
        self._slow = 0
        self._began: float | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_size)
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    @property
    def errors(self) -> int:
        """Calls that raised or overran so far, the one now running included."""
        began = self._began
        stuck = began is not None and time.monotonic() - began > self._timeout_s
        return self._raised + self._slow + int(stuck)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand metrics over without waiting."""
        self._put(lambda: self._sink.log(step, metrics))

    def log_text(self, step: int, key: str, text: str) -> None:
        """Hand a cleaned and capped text over without waiting."""
        cleaned = clean_text(text, TEXT_LIMIT)
        self._put(lambda: self._sink.log_text(step, key, cleaned))

    def close(self) -> None:
        """Give the sink `timeout_s` to finish, then leave it behind."""
        closing = self._put(self._sink.close) + self._put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            self.dropped += max(0, self._calls.qsize() - closing)
            logger.warning("%s did not finish within %.0f s; it is left behind", self.name, self._timeout_s)

    def _put(self, call: Callable[[], None] | None) -> bool:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._began = time.monotonic()
            try:
                call()
            except Exception as error:  # a guest's fault, whatever it is, must not reach training
                self._raised += 1
                if self._raised == 1:
                    logger.warning("%s failed: %s; further failures are only counted", self.name, error)
            else:
                self._slow += time.monotonic() - self._began > self._timeout_s
            finally:
                self._began = None


class TensorboardSink:
    """Scalars and texts as TensorBoard event files (torch's writer, on the tensorboard package).

    The folder is made with the first value.
    """

    def __init__(self, folder: Path) -> None:
        _require("tensorboard")
        _require("torch")
        self._folder = folder
        self._opened: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._writer()
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    def log_text(self, step: int, key: str, text: str) -> None:
        self._writer().add_text(key, text, step)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _writer(self) -> Any:
        if self._opened is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._opened = SummaryWriter(str(self._folder))
        return self._opened


class WandbSink:
    """Scalars and texts as one Weights & Biases run, which signs in with the first value."""

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> None:
        _require("wandb")
        self._open = {"project": project, "name": name, "config": dict(config or {}), "dir": folder}
        self._opened: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run().log(dict(metrics), step=step)

    def log_text(self, step: int, key: str, text: str) -> None:
        self._run().log({key: text}, step=step)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()

    def _run(self) -> Any:
        if self._opened is None:
            import wandb  # pyright: ignore[reportMissingImports]

            self._opened = wandb.init(**self._open)
        return self._opened


def _require(package: str) -> None:
    """Raise MissingDependencyError unless a tracker's package is installed."""
    if find_spec(package) is None:
        raise MissingDependencyError(
            f"{package} is not installed; get it with: pip install 'uni-agent-rl[track]'"
        )


TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The trackers that a config can name, and the package each needs."""


def check_tracker(name: str) -> None:
    """Raise UnknownNameError or MissingDependencyError before anything is written."""
    if name not in TRACKERS:
        raise UnknownNameError("tracker", name, TRACKERS)
    _require(TRACKERS[name])


def open_tracker(name: str, run_dir: Path) -> Sink:
    """Open a tracker by name for the run in `run_dir`."""
    if name == "wandb":
        return WandbSink("uni-agent", run_dir.name, {}, run_dir)
    return TensorboardSink(run_dir / "tensorboard")
