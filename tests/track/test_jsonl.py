"""JSON lines with several writers and after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from uni_agent.track import JsonlWriter, read_jsonl

WRITER = """
import sys
from pathlib import Path
from uni_agent.track.jsonl import JsonlWriter
writer = JsonlWriter(Path(sys.argv[1]))
for k in range(5):
    writer.write({"writer": int(sys.argv[2]), "k": k, "text": "line\\n\\u2028\\"\\U0001f600" + "x" * 300_000})
"""

# a writer that is killed between the two halves of a record, as SIGKILL in the middle of os.write
TORN = """
import os, sys, time
import uni_agent.track.jsonl as jsonl
from pathlib import Path
real = os.write
def half(fd, data):
    real(fd, bytes(data)[: len(data) // 2])
    print("half", flush=True)
    time.sleep(60)
writer = jsonl.JsonlWriter(Path(sys.argv[1]))
writer.write({"k": "whole"})
jsonl.os.write = half
writer.write({"k": "torn", "text": "y" * 1000})
"""


def test_o01_several_writers_leave_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(6)]
    assert [writer.wait(60) for writer in writers] == [0] * 6
    records, damaged = read_jsonl(path)
    assert damaged == 0
    assert sorted((r["writer"], r["k"]) for r in records) == [(n, k) for n in range(6) for k in range(5)]
    assert all(
        r["text"].startswith('line\n\u2028"\U0001f600x') and len(r["text"]) == 300_008 for r in records
    )


def test_o01_torn_line_is_isolated_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with subprocess.Popen([sys.executable, "-c", TORN, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert not path.read_bytes().endswith(b"\n")
    with JsonlWriter(path) as again:
        for k in range(3):
            again.write({"k": k})
    records, damaged = read_jsonl(path)
    assert [r["k"] for r in records] == ["whole", 0, 1, 2]
    assert damaged == 1


def test_missing_file_has_no_records_and_nan_is_refused(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == ([], 0)
    with JsonlWriter(tmp_path / "a.jsonl") as writer, pytest.raises(ValueError, match="JSON"):
        writer.write({"x": float("nan")})
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_writing_is_visible_at_once(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "a.jsonl")
    began = time.monotonic()
    writer.write({"x": "\ud800"})
    assert read_jsonl(tmp_path / "a.jsonl").records == [{"x": "\ud800"}]
    assert time.monotonic() - began < 5
    writer.close()
    writer.close()
