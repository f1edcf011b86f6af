"""What a person sees while a run works: headings, one line per step, notes, small tables.

The same lines serve a terminal and a log file. On a terminal they are coloured, and the newest step
is redrawn in place between two lines; elsewhere there are only whole lines, at most one per
`every_s`. A stream that cannot show a character gets an ASCII stand-in; a stream that breaks is
left alone. A run never ends because of what it shows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.text import Text

from uni_agent.track.text import clean_text

Shown = float | int | str | None

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.:-=+*#"
_BAR_CELLS = 10
_SPARK_CELLS = 12
_REDRAW_S = 0.1
_ERASE_LINE = "\r\x1b[2K"


class LiveConsole:
    """Show progress. `bar` names the metric (by its last part) that is drawn as a bar from 0 to 1.

    `total_steps` None means that the end is not known: no ETA.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        stream: TextIO | None = None,
        bar: str = "reward",
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._encoding = self._stream.encoding or "utf-8"
        self._rich = Console(file=self._stream, highlight=False) if self._stream.isatty() else None
        self._in_place = self._rich is not None and not self._rich.is_dumb_terminal
        self._unicode = _can_encode(_BLOCKS, self._encoding)
        self._bar = bar
        self._every_s = every_s
        self._clock = clock
        self._broken = False
        self._pending: Text | None = None
        self._start(total_steps)

    def phase(self, text: str, total_steps: int | None = None, *, seconds: float = 0.0) -> None:
        """Begin a part of the run under a heading; steps and the time left count anew.

        `total_steps` is how many steps it has, `seconds` how long it may take, where that is known.
        """
        self._commit()
        self._start(total_steps, seconds)
        rule = "──" if self._unicode else "--"
        self._print(Text(f"\n{rule} {clean_text(text)} {rule}", style="bold"))

    def step(self, step: int, metrics: Mapping[str, Shown]) -> None:
        """Show step number `step` of the phase (1 is the first) and its metrics, in their order."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        line = self._line(step, metrics, now)
        if now - self._printed_s >= self._every_s or step == self._total:
            self._pending = None
            self._print(line, erase=True)
            self._printed_s = now
        else:
            self._pending = line
            if self._in_place and now - self._drawn_s >= _REDRAW_S:
                self._drawn_s = now
                self._print(line, erase=True, end="")

    def note(self, text: str) -> None:
        """Say something between steps."""
        self._commit()
        bullet = "·" if self._unicode else "-"
        lines = clean_text(text).split("\n")
        self._print(Text("\n".join([f"  {bullet} {lines[0]}", *(f"    {line}" for line in lines[1:])])))

    def table(self, rows: Sequence[Mapping[str, Shown]]) -> None:
        """Show rows under the keys of the first one; numbers stand to the right."""
        self._commit()
        for number, line in enumerate(table_lines(rows)):
            self._print(Text("  " + line, style="bold" if number == 0 else ""))

    def close(self) -> None:
        """Leave the newest step on the screen and end its line."""
        self._commit()

    def __enter__(self) -> LiveConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, total_steps: int | None, seconds: float = 0.0) -> None:
        self._total, self._seconds = total_steps, seconds
        self._began = self._clock()
        self._first: tuple[int, float] | None = None
        self._printed_s = -math.inf
        self._drawn_s = -math.inf
        self._history: list[float] = []
        self._widths: dict[str, int] = {}

    def _commit(self) -> None:
        """Turn the line that is being redrawn into a lasting one."""
        if self._pending is not None:
            line, self._pending = self._pending, None
            self._print(line, erase=True)

    def _line(self, step: int, metrics: Mapping[str, Shown], now: float) -> Text:
        count = f"{step}/{self._total}" if self._total else str(step)
        line = Text(f"  {count:>{2 * len(str(self._total or 1000)) + 1}}")
        for key, value in metrics.items():
            label = clean_text(key).rpartition("/")[2].removesuffix("_mean")
            shown = format_value(value)
            width = self._widths[key] = max(self._widths.get(key, 0), len(shown))
            line.append(f"  {label} ", style="dim")
            line.append(f"{shown:>{width}}")
            if label == self._bar and isinstance(value, float | int) and math.isfinite(value):
                self._history.append(value)
                line.append(f" {self._meter(value)} {self._spark()}", style="green")
        line.append(f"  {self._time_left(step, now)}", style="dim")
        return line

    def _time_left(self, step: int, now: float) -> str:
        elapsed = now - self._began
        left = [self._seconds - elapsed] if self._seconds else []
        if self._total and step < self._total and self._first is not None:
            # the first step of a phase pays for warming caches, so it is left out once there are more
            first, first_s = self._first
            per_step = (now - first_s) / (step - first) if step > first else elapsed
            left.append(per_step * (self._total - step))
        if not left or step == self._total:
            return f"{format_duration(elapsed)} elapsed"
        return f"{format_duration(max(0.0, min(left)))} left"

    def _meter(self, value: float) -> str:
        full, empty = ("█", "░") if self._unicode else ("#", ".")
        cells = round(min(1.0, max(0.0, value)) * _BAR_CELLS)
        return full * cells + empty * (_BAR_CELLS - cells)

    def _spark(self) -> str:
        """The phase so far as a few blocks, each the mean of its share of the steps."""
        history, blocks = self._history, _BLOCKS if self._unicode else _ASCII_BLOCKS
        cells = min(_SPARK_CELLS, len(history))
        edges = [len(history) * cell // cells for cell in range(cells + 1)]
        means = [sum(history[a:b]) / (b - a) for a, b in pairwise(edges)]
        low = min(means)
        scale = max(max(means) - low, 0.1)  # noise of a flat reward must not look like mountains
        return "".join(blocks[min(7, int(8 * (mean - low) / scale))] for mean in means)

    def _print(self, text: Text, *, erase: bool = False, end: str = "\n") -> None:
        if self._broken:
            return
        try:
            if self._in_place and erase:
                self._stream.write(_ERASE_LINE)
            if self._rich is None:
                self._stream.write(self._fit(text.plain) + end)
            else:
                text.plain = self._fit(text.plain)
                # a line that is redrawn must stay one row; others are the terminal's to wrap
                redrawn = end == ""
                self._rich.print(
                    text, end=end, no_wrap=redrawn, overflow="crop", crop=redrawn, soft_wrap=not redrawn
                )
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or file; ValueError is Python's for the latter
            self._broken = True

    def _fit(self, text: str) -> str:
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)


def table_lines(rows: Sequence[Mapping[str, Shown]]) -> list[str]:
    """Lay rows out in columns under a heading line; no rows give no lines."""
    if not rows:
        return []
    keys = list(rows[0])
    cells = [[format_value(row.get(key)) for key in keys] for row in rows]
    heads = [clean_text(key) for key in keys]
    right = [all(not isinstance(row.get(key), str) for row in rows) for key in keys]
    widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(len(keys))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [heads, *cells]
    ]


def format_value(value: Shown) -> str:
    """A metric for the eye: three or four digits, `-` for what is missing or not finite."""
    if value is None or isinstance(value, str):
        return "-" if value is None else clean_text(value).replace("\n", " ")
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 10:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.001 or size == 0 else f"{value:.1e}"


def format_duration(seconds: float) -> str:
    """Seconds as `12 s`, `3:05` or `1:02:03`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
