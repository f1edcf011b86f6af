"""`init` and `doctor`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from uni_agent.cli import main
from uni_agent.envs import EnvRegistry
from uni_agent.types import Message, ToolResult

REPAIRED = {
    "clamp": "def clamp(x, low, high):\n    return max(low, min(high, x))\n",
    "total": "def total(numbers):\n    return sum(numbers)\n",
    "is_even": "def is_even(n):\n    return n % 2 == 0\n",
}


def passes(code: str, tests: list[str]) -> bool:
    names: dict[str, object] = {}
    exec(code, names)
    try:
        for test in tests:
            exec(test, names)
    except AssertionError:
        return False
    return True


def test_init_writes_a_project_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my project"
    assert main(["init", str(folder)]) == 0
    assert "cd '" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "grpo.toml",
        "my_env.py",
        "tasks.jsonl",
    ]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    config = tomllib.loads((folder / "grpo.toml").read_text())
    EnvRegistry.register(name="init-test", entry_point=config["world"]["env"].replace(":", "."), replace=True)
    tasks = EnvRegistry.load_tasks("init-test", config["tasks"])
    assert [task.id for task in tasks] == list(REPAIRED)
    for task in tasks:
        assert not passes(task.data["code"], task.data["tests"])
        assert passes(REPAIRED[task.id], task.data["tests"])
        assert task.data["code"] in task.prompt[0].content


async def test_the_projects_world_plays(tmp_path: Path) -> None:
    from uni_agent.cli.project.my_env import MyEnv

    world = MyEnv()
    failing = ToolResult("c", "code_executor", "1 of 3", data={"passed": 1, "total": 3})
    passing = ToolResult("c", "code_executor", "3 of 3", data={"passed": 3, "total": 3})
    first = await world.step(Message("assistant"), [failing])
    assert (first.reward, first.terminated) == (0.0, False)
    second = await world.step(Message("assistant"), [failing, passing])
    assert (second.reward, second.terminated) == (1.0, True)
    assert not (await world.step(Message("assistant"), [])).terminated


def test_init_refuses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_doctor_reports_and_exits_3_when_something_needed_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["train"]["torch"].startswith("2.")
    assert report["sandbox"]["level"] >= 1
    assert report["missing"] == []
    import uni_agent.cli.doctor as module

    real = module._version
    monkeypatch.setattr(module, "_version", lambda name: None if name == "torch" else real(name))
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "MISSING\n  torch: pip install 'uni-agent-rl[train]'" in out
    assert "ready" not in out


def test_the_project_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).save_pretrained(
        tmp_path / "model"
    )
    assert main(["init", str(tmp_path / "project")]) == 0
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    capsys.readouterr()
    assert main(["train", "grpo", "@", "grpo.toml", "--model", "../model", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["tasks"] == 3
    assert shown["config"]["world"]["env"] == "my_env:MyEnv"
    assert not (tmp_path / "project" / "runs").exists()
