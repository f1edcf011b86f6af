"""The run directory."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from uni_agent.config import BaseConfig, load_config
from uni_agent.errors import MissingDependencyError, UsageError
from uni_agent.track import Run, WandbSink, clean_text, read_jsonl, read_metrics
from uni_agent.track.sinks import TEXT_LIMIT, GuardedSink


class Config(BaseConfig):
    steps: int = 3


def test_create_names_runs_and_never_overwrites(tmp_path: Path) -> None:
    first, second = (Run.create("grpo", Config(), root=tmp_path) for _ in range(2))
    assert first.name.startswith("grpo-")
    assert first.name.endswith("-1")
    assert second.name.endswith("-2")
    with first, second:
        pass
    assert load_config(Config, ["@", str(first.path / "config.toml")]) == Config()
    with pytest.raises(UsageError, match="exists and is not empty"):
        Run.create("grpo", Config(), root=tmp_path, name=first.name)
    (tmp_path / "empty").mkdir()
    Run.create("grpo", Config(), root=tmp_path, name="empty").close()


def test_resume_needs_a_run_and_keeps_the_old_config(tmp_path: Path) -> None:
    with Run.create("sft", Config(), root=tmp_path, name="mine") as run:
        run.log(1, {"train/loss": 2.0})
        run.log(2, {"train/loss": 1.0})
    with Run.create("sft", Config(steps=9), root=tmp_path, name="mine", resume=True) as run:
        run.log(2, {"train/loss": 0.5})
    assert "steps = 9" in (run.path / "config.toml").read_text()
    assert "steps = 3" in (run.path / "config-1.toml").read_text()
    assert [(row["step"], row["train/loss"]) for row in read_metrics(run.path).rows] == [(1, 2.0), (2, 0.5)]
    with pytest.raises(UsageError, match="did you mean 'mine'"):
        Run.create("sft", Config(), root=tmp_path, name="mime", resume=True)


def test_nan_becomes_null_and_is_counted(tmp_path: Path) -> None:
    with Run.create("sft", Config(), root=tmp_path) as run:
        run.log(1, {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": 3, "e": None})
        run.log(2, {"a": 1.0})
        run.write_summary({"x": math.nan, "path": run.path, "deep": [{"y": np.float32(1)}]})
    rows, damaged = read_metrics(run.path)
    assert damaged == 0
    assert {k: rows[0][k] for k in "abcde"} == {"a": None, "b": None, "c": 0.5, "d": 3, "e": None}
    assert rows[0]["track/nonfinite_values"] == 2
    assert "track/nonfinite_values" not in rows[1]
    assert run.nonfinite_values == 2
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary == {"x": None, "path": str(run.path), "deep": [{"y": 1.0}]}


def test_o01_metrics_survive_a_torn_last_line(tmp_path: Path) -> None:
    with Run.create("sft", Config(), root=tmp_path, name="r") as run:
        run.log(1, {"a": 1.0})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "a"')
    with Run.create("sft", Config(), root=tmp_path, name="r", resume=True) as run:
        run.log(2, {"a": 2.0})
    rows, damaged = read_metrics(run.path)
    assert [(row["step"], row["a"]) for row in rows] == [(1, 1.0), (2, 2.0)]
    assert damaged == 1


def test_read_metrics_refuses_another_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        read_metrics(tmp_path)


def test_spans_nest_and_keep_the_error(tmp_path: Path) -> None:
    with Run.create("sft", Config(), root=tmp_path) as run:
        with pytest.raises(RuntimeError), run.span("step", step=4), run.span("generate"):
            raise RuntimeError("engine died")
        with run.span("after"):
            pass
    spans = read_jsonl(run.path / "spans.jsonl").records
    assert [(s["name"], s["parent"], s["step"], s["error"]) for s in spans] == [
        ("generate", "step", None, "RuntimeError: engine died"),
        ("step", None, 4, "RuntimeError: engine died"),
        ("after", None, None, None),
    ]
    assert all(s["duration_s"] >= 0 for s in spans)


def test_log_file_takes_the_package_logger_and_lets_it_go(tmp_path: Path) -> None:
    package = logging.getLogger("uni_agent")
    before = list(package.handlers)
    with Run.create("sft", Config(), root=tmp_path) as run:
        logging.getLogger("uni_agent.rollout").warning("episode lost: \ud800")
    with pytest.raises(ZeroDivisionError), Run.create("sft", Config(), root=tmp_path) as broken:
        _ = 1 / 0
    assert package.handlers == before
    assert "WARNING uni_agent.rollout: episode lost: \\ud800" in (run.logs_dir / "run.log").read_text()
    assert "ZeroDivisionError" in (broken.logs_dir / "run.log").read_text()


class Stubborn:
    """Raises on the second call, blocks on the third."""

    def __init__(self) -> None:
        self.calls = 0
        self.texts: list[str] = []
        self.release = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise UnicodeError("surrogates not allowed")
        if self.calls == 3:
            self.release.wait(60)

    def log_text(self, step: int, key: str, text: str) -> None:
        self.texts.append(text)

    def close(self) -> None:
        pass


def test_o02_tracker_that_raises_and_blocks_costs_training_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = "\ud800\x00\x0b\ue000" + "z" * 5_000_000 + "end"
    sink = Stubborn()
    began = time.monotonic()
    with Run.create("sft", Config(), root=tmp_path, name="r") as run:
        guarded = GuardedSink(sink, timeout_s=0.2)
        run.sinks = (guarded,)
        run.log_text(1, "sample", sample)
        for step in range(1, 5):
            run.log(step, {"train/loss": 1.0 / step})
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 8
    assert guarded.errors == 2
    assert guarded.dropped == 1  # step 4 stood behind the call that never returned
    sink.release.set()
    assert [row["step"] for row in read_metrics(run.path).rows] == [1, 2, 3, 4]
    (kept,) = read_jsonl(run.logs_dir / "texts.jsonl").records
    assert kept["text"] == sample
    (shown,) = sink.texts
    assert shown.startswith("\\ud800\\x00\\x0b\\ue000zzz")
    assert "characters cut" in shown
    assert shown.endswith("end")
    assert len(shown) < TEXT_LIMIT + 200


def test_full_queue_drops_instead_of_waiting() -> None:
    sink = Stubborn()
    sink.calls = 2  # the next call blocks
    guarded = GuardedSink(sink, timeout_s=0.1, queue_size=2)
    began = time.monotonic()
    for step in range(50):
        guarded.log(step, {})
    assert time.monotonic() - began < 2
    assert guarded.dropped >= 47
    sink.release.set()
    guarded.close()


def test_tensorboard_sink_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    with Run.create("sft", Config(), root=tmp_path, trackers=["tensorboard"]) as run:
        run.log(1, {"train/loss": 1.0, "bad": math.nan})
    run.close()
    assert [sink.errors for sink in run.sinks] == [0]
    (events,) = run.path.rglob("events.out.tfevents.*")
    assert b"train/loss" in events.read_bytes()
    assert b"bad" not in events.read_bytes()


def test_unknown_tracker_is_named_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tensorboard"):
        Run.create("sft", Config(), root=tmp_path, trackers=["tensorbord"])
    assert list(tmp_path.iterdir()) == []


def test_missing_tracker_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uni_agent.track.sinks.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"uni-agent-rl\[track\]") as caught:
        WandbSink("project", "name", {}, tmp_path)
    assert caught.value.exit_code == 3


def test_clean_text() -> None:
    assert clean_text("a\tb\nç 日本 \U0001f600") == "a\tb\nç 日本 \U0001f600"
    assert clean_text("\x1b[31m\u2028\u202e\u200d") == "\\x1b[31m\\u2028\\u202e\u200d"
    cut = clean_text("a" * 50 + "b" * 50, 20)
    assert cut == "a" * 15 + "\n[... 80 characters cut ...]\n" + "b" * 5
