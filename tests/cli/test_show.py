"""`show`: a run's episodes, a transcript, metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from uni_agent.cli import main
from uni_agent.config import BaseConfig
from uni_agent.rollout import EpisodeStore
from uni_agent.track import Run
from uni_agent.types import (
    Episode,
    Message,
    Sampling,
    Task,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)


class Config(BaseConfig):
    steps: int = 3


def turn(
    start: int, observed: Message, message: Message, result: ToolResult | None, reward: float | None
) -> Turn:
    return Turn(
        observation=(start, start + 2),
        sampled=(start + 2, start + 5),
        observed=(observed,),
        message=message,
        finish="stop",
        sampling=Sampling(),
        tool_results=(result,) if result else (),
        reward=reward,
        timing=Timing(0.0, 1.25, 0.5),
    )


def episode(name: str, reward: float | None = 0.75) -> Episode:
    asked = Message("user", "Fix this function.\x1b[31m\n日本")
    called = Message(
        "assistant", reasoning="hm", tool_calls=(ToolCall("c0", "code_executor", {"code": "x = 1"}),)
    )
    broken = Message("assistant", "done", tool_calls=(ToolCall("c1", "", {}, "{bad", "not JSON"),))
    result = ToolResult(
        "c0", "code_executor", "1 of 2 tests passed", failure="abnormal", error_kind="malformed"
    )
    sampled = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    trajectory = Trajectory(
        "main",
        np.arange(10, dtype=np.int32),
        sampled,
        np.where(sampled, -0.5, 0).astype(np.float32),
        np.where(sampled, 3, -1).astype(np.int32),
        (
            turn(0, asked, called, result, 0.25),
            turn(5, Message("tool", "1 of 2 tests passed", tool_call_id="c0"), broken, None, None),
        ),
    )
    return Episode(
        name,
        Task("task-1", (asked,)),
        (trajectory,),
        "max_turns",
        rewards={"pass_rate": 0.5},
        reward=reward,
        reward_reason=None if reward is not None else "the grader crashed",
        artifacts={"solution.py": b"x = 1"},
    )


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with Run.create("grpo", Config(), name="mine") as run:
        for step in range(1, 8):
            run.log(step, {"rollout/reward_mean": step / 10, "train/loss": None})
        EpisodeStore(run.path).write(0, [episode("task-1/0"), episode("task-1/1", None)])
    return run.path


def test_show_lists_episodes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "mine"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["id", "split", "step", "turns", "tokens", "end", "reward", "error"]
    assert out[1].split() == ["task-1/0", "train", "0", "2", "6", "max_turns", "0.750"]
    assert out[2].split()[-1] == "-"
    assert out[3].startswith("2 of 2 episodes")
    assert main(["show", str(run_dir), "--limit", "1", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ["task-1/1"]
    assert main(["show", "mine", "--end", "done"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 0 episodes")


def test_show_prints_a_transcript(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "mine", "task-1/0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for expected in (
        "=== agent main: 10 tokens, 6 sampled",
        "[user]",
        "  Fix this function.\\x1b[31m",
        "  日本",
        "--- turn 1: 2 tokens seen, 3 sampled, stop, 1.25 s, reward 0.250",
        "  (thinks) hm",
        "  calls code_executor",
        "  code = x = 1",
        "[code_executor answered in 0.00 s, abnormal failure, malformed]",
        "--- turn 2: 2 tokens seen, 3 sampled, stop, 1.25 s, reward -",
        "  call that does not parse (not JSON): {bad",
        "=== end: max_turns (truncated)",
        "reward 0.750",
        "  pass_rate 0.500",
        "artifact solution.py (5 bytes)",
    ):
        assert expected in lines
    assert lines.count("  1 of 2 tests passed") == 1
    assert main(["show", "mine", "task-1/1"]) == 0
    assert "reward - (the grader crashed)" in capsys.readouterr().out
    assert main(["show", "mine", "task-1/0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trajectories"][0]["turns"][0]["reward"] == 0.25


def test_show_metrics(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, ')
    assert main(["show", "mine", "--metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "step", "3", "step", "4", "step", "5", "step", "6", "step", "7"]
    assert "rollout/reward_mean   0.300   0.400   0.500   0.600   0.700" in lines
    assert lines[-1] == "1 damaged lines were skipped"


def test_unknown_runs_and_episodes_say_the_nearest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "mime"]) == 2
    assert capsys.readouterr().err == "error: unknown run 'mime'; did you mean 'mine'?\n"
    assert main(["show", "mine", "task-1/7"]) == 2
    assert "error: unknown episode 'task-1/7'; did you mean 'task-1/" in capsys.readouterr().err
    assert main(["show", "."]) == 2
    assert "is not a run directory" in capsys.readouterr().err
