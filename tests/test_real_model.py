"""examples/real_model: its questions and reward; and, where the model was fetched, two steps of training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from uni_agent.api import resolve_tool
from uni_agent.config.known_models import is_fetched
from uni_agent.config.load import read_toml
from uni_agent.errors import UnknownNameError
from uni_agent.types import Task, ToolCall

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


def test_held_out_shares_neither_wording_nor_values_with_training(calls: ModuleType) -> None:
    train, held_out = (list(calls.CallEnv.tasks(split, NUM, 0)) for split in ("train", "held_out"))
    assert not questions(train) & questions(held_out)
    one, other = calls.SPLITS["train"], calls.SPLITS["held_out"]
    for tool in calls.TOOLS:
        assert not set(one.templates[tool]) & set(other.templates[tool])
        assert one.templates[tool]
        assert other.templates[tool]
    shown = {(tool, name, value) for _, tool, arguments in calls.SHOTS for name, value in arguments.items()}
    trained, asked = (
        {(t.data["tool"], name, value) for t in tasks for name, value in t.data["arguments"].items()}
        for tasks in (train, held_out)
    )
    # both feet and yards are converted to meters
    assert trained & asked <= {("convert_unit", "target", "meters")}
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


def test_the_right_call_of_every_task_fits_the_tools_schema(calls: ModuleType) -> None:
    specs = {
        resolve_tool(f"calls:{name}").spec.name: resolve_tool(f"calls:{name}").spec for name in calls.TOOLS
    }
    kinds = {"integer": int, "string": str}
    for task in calls.CallEnv.tasks("train", NUM, 0):
        properties = specs[task.data["tool"]].parameters["properties"]
        assert {name: type(value) for name, value in task.data["arguments"].items()} == {
            name: kinds[kind["type"]] for name, kind in properties.items()
        }


@pytest.mark.parametrize(
    ("name", "arguments", "score"),
    [
        ("set_timer", {"minutes": 5, "label": "tea"}, 1.0),
        ("set_timer", {"label": "The Tea", "minutes": 5}, 1.0),
        ("set_timer", {"minutes": "5", "label": "tea"}, 0.65),
        ("set_timer", {"minutes": True, "label": "tea"}, 0.65),
        ("set_timer", {"minutes": 5, "label": "tea", "day": "Monday"}, 0.3 + 0.5 * 2 / 3),
        ("set_timer", {"minutes": 5}, 0.55),
        ("set_timer", {}, 0.3),
        ("get_weather", {"minutes": 5, "label": "tea"}, 0.05),
        ("timer", {"minutes": 5, "label": "tea"}, 0.05),
    ],
)
def test_only_the_exact_call_is_worth_one(
    calls: ModuleType, name: str, arguments: dict[str, object], score: float
) -> None:
    call = ToolCall("call_0", name, arguments)
    assert calls.call_score(call, "set_timer", {"minutes": 5, "label": "tea"}) == pytest.approx(score)


def test_two_steps_on_the_real_model(
    calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train.toml` says, only smaller, and with an adapter so that the checkpoint is small too."""
    if not is_fetched("smollm2"):
        pytest.skip("SmolLM2 is not here; get it with: uni-agent model fetch smollm2")
    from uni_agent.cli import main

    monkeypatch.chdir(EXAMPLE)
    assert read_toml(Path("train.toml"))["model"] == "smollm2"
    small = "--steps 2 --groups-per-step 1 --group-size 4 --optimizer.lora-rank 8 --held-out.num-tasks 2"
    assert main(["train", "grpo", "@", "train.toml", *small.split(), f"--run.root={tmp_path}", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 2
    assert 0 <= summary["held_out_after"] <= 1
    rows = [json.loads(line) for line in (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert sum("rollout/reward_mean" in row for row in rows) == 2
    assert (Path(summary["model"]) / "adapter_model.safetensors").is_file()
