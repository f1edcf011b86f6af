"""The live lines: a terminal, a log file, an ASCII stream, a closed pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from uni_agent.track import LiveConsole
from uni_agent.track.live import format_duration, format_value, table_lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(stream: io.TextIOBase, clock: Clock, total: int | None = 10) -> LiveConsole:
    return LiveConsole(total, stream=stream, clock=clock)  # pyright: ignore[reportArgumentType]


def utf8() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")


def text_of(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(stream.encoding)


def test_lines_in_a_log_file() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock)
    live.phase("Training", 10)
    for step in range(1, 11):
        clock.now += 2.0
        live.step(step, {"rollout/reward_mean": step / 10, "train/loss": 1e-5, "rollout/tokens": None})
    live.table([{"what": "within five", "before": 0.25, "after": 0.875}])
    lines = text_of(stream).splitlines()
    assert lines[1] == "── Training ──"
    assert len(lines) == 2 + 10 + 2
    assert lines[2] == "   1/10  reward 0.100 █░░░░░░░░░ ▁  loss 1.0e-05  tokens -  18 s left"
    assert lines[6].startswith("   5/10  reward 0.500 █████░░░░░ ▁▃▄▇█")
    assert lines[6].endswith("10 s left")
    assert lines[11].endswith("20 s elapsed")
    assert lines[12:] == ["  what         before  after", "  within five   0.250  0.875"]
    assert "\x1b" not in text_of(stream)


def test_fast_steps_are_thinned_but_the_last_is_shown() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock, 1000)
    for step in range(1, 1001):
        clock.now += 0.01
        live.step(step, {"loss": 1.0})
    lines = text_of(stream).splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[-1].startswith("  1000/1000")


def test_a_note_keeps_the_step_that_was_not_yet_printed() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock, None)
    live.step(1, {"loss": 1.0})
    live.step(2, {"loss": 2.0})
    live.note("checkpoint\nkept")
    lines = text_of(stream).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "·", "kept"]


def test_a_phase_that_ends_by_the_clock_counts_down() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock, 300)
    live.phase("Training", seconds=40.0)
    clock.now += 10.0
    live.step(1, {"reward": 1.0})
    clock.now += 35.0
    live.step(2, {"reward": 1.0})
    live.phase("Few steps", 3, seconds=40.0)
    clock.now += 2.0
    live.step(1, {"reward": 1.0})
    live.phase("Many steps", 300, seconds=40.0)
    clock.now += 2.0
    live.step(1, {"reward": 1.0})
    lines = text_of(stream).splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines if "1/3" in line] == ["4 s left", "38 s left"]
    assert lines[2].lstrip().startswith("1  reward")
    assert lines[2].endswith("30 s left")
    assert lines[3].endswith("0 s left")


def test_phases_count_anew() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock, 4)
    live.step(4, {"reward": 1.0})
    live.phase("Training", 8)
    clock.now = 6.0
    live.step(1, {"reward": 0.0})
    assert text_of(stream).splitlines()[-1] == "  1/8  reward 0.000 ░░░░░░░░░░ ▁  42 s left"


def test_o02_ascii_stdout_does_not_crash() -> None:
    code = (
        "from uni_agent.track import LiveConsole\n"
        "live = LiveConsole(2)\n"
        "live.phase('Übung \\ud800')\n"
        "live.step(1, {'reward': .5}); live.step(2, {'reward': 1.})\n"
        "live.note('a\\x0bb \\ue000 日'); live.table([{'ü': 'é'}])\n"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode("ascii")
    assert "-- \\xdcbung \\ud800 --" in out
    assert "reward 0.500 #####..... _" in out
    assert "- a\\x0bb \\ue000 \\u65e5" in out


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_a_terminal_redraws_the_newest_step_in_place(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream, clock = Terminal(io.BytesIO(), encoding="utf-8", newline="\n"), Clock()
    live = console(stream, clock, 3)
    for step in (1, 2, 3):
        live.step(step, {"reward": 0.5, "a_long_metric_name": 1.0, "another_long_metric_name": 2.0})
        clock.now += 0.2
    first, second, third = text_of(stream).split("\r\x1b[2K")[1:]
    assert first.endswith("\n")
    assert "\n" not in second  # cropped to the width and drawn over by the third
    assert third.endswith("\n")
    assert "\x1b[32m" in first


def test_a_closed_stream_is_left_alone() -> None:
    stream, clock = utf8(), Clock()
    live = console(stream, clock)
    stream.close()
    live.step(1, {"reward": 0.5})
    live.note("still alive")


def test_numbers_and_durations() -> None:
    values = [None, float("nan"), 0.0, 0.5, 12.345, 123.456, 12345.6, 123456, 7, "x\ny"]
    shown = ["-", "-", "0.000", "0.500", "12.35", "123.5", "12,346", "123,456", "7", "x y"]
    assert [format_value(value) for value in values] == shown
    assert [format_duration(s) for s in (0, 59.6, 61, 3723)] == ["0 s", "1:00", "1:01", "1:02:03"]
    assert table_lines([]) == []
