"""examples/real_model: its questions and reward; and, where the model was fetched, two steps of training."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from uni_agent.config.known_models import is_fetched
from uni_agent.config.load import read_toml
from uni_agent.errors import UnknownNameError
from uni_agent.render.calls import call_text, read_assistant
from uni_agent.types import Episode, Message, Sampling, Task, ToolCall, Trajectory, Turn

EXAMPLE = Path(__file__).parents[1] / "examples" / "real_model"
NUM = 300


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "calls", raising=False)
    import calls

    return calls


def questions(tasks: list[Task]) -> set[str]:
    return {task.prompt[-1].content for task in tasks}


def values(tasks: list[Task]) -> set[tuple[str, str, object]]:
    return {(t.data["tool"], name, value) for t in tasks for name, value in t.data["arguments"].items()}


def test_held_out_shares_neither_wording_nor_values_with_training(calls: ModuleType) -> None:
    train, held_out = (list(calls.CallEnv.tasks(split, NUM, 0)) for split in ("train", "held_out"))
    assert not questions(train) & questions(held_out)
    one, other = calls.SPLITS["train"], calls.SPLITS["held_out"]
    for tool in calls.TOOLS:
        assert one.templates[tool]
        assert other.templates[tool]
        assert not set(one.templates[tool]) & set(other.templates[tool])
    shown = {(tool, name, value) for _, tool, arguments in calls.SHOTS for name, value in arguments.items()}
    trained, asked = values(train), values(held_out)
    assert not trained & asked
    assert not shown & (trained | asked)


def test_a_question_holds_what_its_call_needs_and_its_id_makes_it_again(calls: ModuleType) -> None:
    for split in ("train", "held_out"):
        tasks = list(calls.CallEnv.tasks(split, NUM, 3))
        assert {task.data["tool"] for task in tasks} == set(calls.TOOLS)
        for task in tasks:
            assert all(str(value) in task.prompt[-1].content for value in task.data["arguments"].values())
            assert calls.CallEnv.task(task.id) == task
    with pytest.raises(UnknownNameError, match="train-0-0"):
        calls.CallEnv.task("train-zero")


def test_the_right_call_of_every_task_fits_its_tools_signature(calls: ModuleType) -> None:
    for task in calls.CallEnv.tasks("train", NUM, 0):
        tool = calls.TOOLS[task.data["tool"]]
        assert calls.signature_of(tool) in task.prompt[0].content
        wanted = {name: p.annotation for name, p in inspect.signature(tool, eval_str=True).parameters.items()}
        assert {name: type(value) for name, value in task.data["arguments"].items()} == wanted


def episode(task: Task, text: str) -> Episode:
    turn = Turn((0, 1), (1, 2), task.prompt, read_assistant(text), "stop", Sampling())
    sampled = np.array([False, True])
    tape = Trajectory(
        "main", np.zeros(2, np.int32), sampled, np.zeros(2, np.float32), np.array([-1, 0], np.int32), (turn,)
    )
    return Episode("0/x/0", task, (tape,), "done")


RIGHT = call_text(ToolCall("call_0", "set_timer", {"minutes": 15}))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (RIGHT, 1.0),
        (RIGHT.replace("15", '"15"'), 0.5),
        (RIGHT.replace("15", "15.0"), 0.5),
        (RIGHT.replace("15", '15, "day": "Monday"'), 0.3 + 0.5 / 2),
        (RIGHT.replace("minutes", "time"), 0.3),
        (RIGHT.replace("set_timer", "weather"), 0.1),
        (RIGHT.replace("set_timer", "timer"), 0.1),
        (RIGHT.replace("}}", "}"), 0.15),
        (RIGHT.replace("}}", "}").replace("set_timer", "weather"), 0.05),
        (RIGHT + "\n" + RIGHT, 0.0),
        ("Here it is: " + RIGHT, 0.0),
        ("The timer is set to 15 minutes.", 0.0),
    ],
)
def test_only_the_exact_call_is_worth_one(calls: ModuleType, text: str, reward: float) -> None:
    data = {"tool": "set_timer", "arguments": {"minutes": 15}}
    task = Task("x", (Message("user", "Set a timer of 15 minutes."),), data)
    assert calls.exact_call(episode(task, text)) == pytest.approx(reward)


def test_two_steps_on_the_real_model(
    calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train.toml` says, only smaller."""
    if not is_fetched("smollm2"):
        pytest.skip("SmolLM2 is not here; get it with: uni-agent model fetch smollm2")
    from uni_agent.cli import main

    monkeypatch.chdir(EXAMPLE)
    assert read_toml(Path("train.toml"))["model"] == "smollm2"
    small = "--steps 2 --groups-per-step 2 --group-size 4 --held-out.num-tasks 2"
    assert main(["train", "grpo", "@", "train.toml", *small.split(), f"--run.root={tmp_path}", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 2
    assert 0 <= summary["held_out_after"] <= 1
    rows = [json.loads(line) for line in (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/reward_mean" in row for row in rows) == 2
    assert (Path(summary["model"]) / "adapter_model.safetensors").is_file()
