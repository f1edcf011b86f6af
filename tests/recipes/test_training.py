"""The shipped recipes on the shipped base model, a few steps each: what they leave behind, and resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from uni_agent.cli import main
from uni_agent.config import load_config
from uni_agent.errors import CheckpointError, ConfigError, TaskFileError, UniAgentError
from uni_agent.models import HFAutoModel
from uni_agent.recipes import engine, evaluate, grpo, ppo, rollout, sft
from uni_agent.recipes.sections import EngineConfig
from uni_agent.render import load_renderer
from uni_agent.rollout import EpisodeStore
from uni_agent.track import read_metrics

BASE = Path(__file__).parents[2] / "examples/code_repair/base"
torch.set_num_threads(1)

TASKS = [
    {
        "id": f"t{i}",
        "code": f"def add(a, b):\n    return a - b - {i}",
        "tests": [f"assert add(1, 2) == {3 - i}"],
    }
    for i in range(4)
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


def settings(tasks: Path, tmp_path: Path, *more: str) -> list[str]:
    return [
        f"--model={BASE}",
        f"--tasks={tasks}",
        "--num-tasks=0",
        f"--held-out.tasks={tasks}",
        "--held-out.num-tasks=0",
        "--sampling.max-tokens=40",
        "--world.concurrency=16",
        f"--run.root={tmp_path}/runs",
        "--run.name=x",
        *more,
    ]


def test_grpo_leaves_everything_behind_and_resumes(tasks: Path, tmp_path: Path) -> None:
    small = ("--group-size=4", "--groups-per-step=2", "--run.save-every=1")
    summary = grpo.run(load_config(grpo.Config, settings(tasks, tmp_path, "--steps=2", *small)))
    run = tmp_path / "runs/x"
    assert summary["steps"] == 2
    assert {
        "held_out_before",
        "held_out_after",
        "first_attempt_before",
        "first_attempt_after",
        "seconds",
    } <= set(summary)
    assert json.loads((run / "summary.json").read_text())["version"] == 2
    rows = read_metrics(run).rows
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["rollout/episodes"] == 8
    assert "ratio_error_max" not in rows[0] or rows[0]["train/ratio_error_max"] < 1e-4
    store = EpisodeStore(run)
    assert len(store.read(0)) == 8
    assert {e.oldest_version for e in store.read(1)} <= {1}
    assert len(store.read(0, split="eval_tasks")) == 4

    again = grpo.run(
        load_config(grpo.Config, ["@", str(run / "config.toml"), f"--resume={run}", "--steps=3"])
    )
    assert (again["steps"], again["version"]) == (3, 3)
    assert {e.oldest_version for e in store.read(2)} == {2}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = AutoTokenizer.from_pretrained(run / "model")("def add", return_tensors="pt")
    assert torch.isfinite(model(**ids).logits).all()


@pytest.mark.parametrize(("dtype", "low", "high"), [("auto", 0.0, 1e-5), ("bfloat16", 1e-4, 0.1)])
def test_the_gap_between_engine_and_learner_is_logged_each_step(
    tasks: Path, tmp_path: Path, dtype: str, low: float, high: float
) -> None:
    """At the first update of a step: the later ones of PPO have another policy."""
    more = (f"--engine.dtype={dtype}", "--steps=2", "--groups-per-step=2", "--minibatch=1", "--epochs=2")
    steep = ("--optimizer.lr=1e-3", "--optimizer.warmup-steps=0", "--entropy-coef=1.0")
    ppo.run(load_config(ppo.Config, settings(tasks, tmp_path, *more, *steep)))
    rows = [row for row in read_metrics(tmp_path / "runs/x").rows if row.get("train/tokens")]
    assert len(rows) == 2
    assert all(low < row["engine/logprob_gap"] < high for row in rows)
    assert all(row["train/logprob_gap"] > row["engine/logprob_gap"] for row in rows)
    assert all(row["engine/logprob_gap"] <= row["engine/logprob_gap_max"] for row in rows)


def test_ppo_with_kl_in_the_reward(tasks: Path, tmp_path: Path) -> None:
    more = ("--steps=2", "--groups-per-step=4", "--minibatch=2", "--epochs=2", "--kl-coef=0.05")
    summary = ppo.run(load_config(ppo.Config, settings(tasks, tmp_path, *more)))
    assert summary["version"] == 2
    rows = read_metrics(tmp_path / "runs/x").rows
    assert any("train/value_loss" in row for row in rows)


def test_lora_trains_only_the_adapter(tasks: Path, tmp_path: Path) -> None:
    more = ("--steps=1", "--group-size=4", "--groups-per-step=2", "--optimizer.lora-rank=2", "--kl-coef=0.1")
    grpo.run(load_config(grpo.Config, settings(tasks, tmp_path, *more)))
    assert (tmp_path / "runs/x/model/adapter_model.safetensors").exists()


def test_dry_run_plans_and_writes_nothing(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "grpo", "--dry-run", *settings(tasks, tmp_path, "--steps=7")]) == 0
    shown = capsys.readouterr().out
    assert "steps = 7" in shown
    assert "episodes: 896" in shown
    assert "memory_bytes" in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--world.env=code_debug_evn", "did you mean 'code_debug_env'"),
        ("--world.tools=code_exekutor", "did you mean 'code_executor'"),
        ("--world.reward=code_test_pass_rat", "did you mean 'code_test_pass_rate'"),
        ("--model=/nowhere", "/nowhere"),
        ("--tasks=/nowhere.jsonl", "/nowhere.jsonl"),
        ("--run.trackers=tensorbord", "did you mean 'tensorboard'"),
        ("--learning-rate=1", "learning-rate"),
        ("--steps=0", "'steps' should be greater than or equal to 1, got 0"),
        ("--kl-coef=-0.1", "'kl_coef' should be greater than or equal to 0, got -0.1"),
        ("--kl-coef=nan", "'kl_coef' should be"),
        ("--engine.cache-gib=-1", "'engine.cache_gib' should be greater than or equal to 0"),
        ("--optimizer.lr=-1", "'optimizer.lr' should be greater than or equal to 0"),
        ("--sampling.temperature=-1", "'sampling.temperature' should be greater than or equal to 0"),
        ("--sampling.max-tokens=0", "'sampling.max_tokens' should be greater than or equal to 1"),
        ("--sampling.top-p=2", "'sampling.top_p' should be less than or equal to 1"),
        ("--world.concurrency=0", "'world.concurrency' should be greater than or equal to 1"),
    ],
)
def test_wrong_names_end_in_one_line_and_code_2(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    assert main(["train", "grpo", *settings(tasks, tmp_path, "--steps=1", flag)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]


def test_n02_fewer_tasks_than_a_step_still_train(tasks: Path, tmp_path: Path) -> None:
    more = ("--steps=1", "--group-size=2", "--groups-per-step=6", "--held-out.tasks=[]")
    summary = grpo.run(load_config(grpo.Config, settings(tasks, tmp_path, *more)))
    assert summary["steps"] == 1
    assert len(EpisodeStore(tmp_path / "runs/x").read(0)) == 12


def test_x01_prompt_longer_than_the_context_is_a_labelled_episode(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    long = {"id": "long", "code": "def f():\n" + "    x = 12345\n" * 1200, "tests": ["assert f() == 1"]}
    path.write_text("".join(json.dumps(task) + "\n" for task in [*TASKS, long]))
    rollout.run(
        load_config(
            rollout.Config,
            [f"--model={BASE}", f"--tasks={path}", "--num-tasks=0", "--sampling.max-tokens=30"]
            + [f"--runs={tmp_path}/runs", "--run=x"],
        )
    )
    episodes = {e.task.id: e for e in EpisodeStore(tmp_path / "runs/x").read(0, split="rollout")}
    assert (episodes["long"].end, episodes["long"].reward) == ("context_full", None)
    assert all(episodes[f"t{i}"].reward is not None for i in range(4))


def test_evaluate_reports_intervals_and_pass_at_k(tasks: Path, tmp_path: Path) -> None:
    config = load_config(
        evaluate.Config,
        [f"--model={BASE}", f"--tasks={tasks}", "--num-tasks=0", "--num-attempts=3", "--pass-at=1,3"]
        + ["--sampling.max-tokens=30", f"--runs={tmp_path}/runs", "--run=x"],
    )
    summary = evaluate.run(config)
    assert summary["episodes"] == 12
    assert 0 <= summary["success_low"] <= summary["success"] <= summary["success_high"] <= 1
    assert summary["pass@3"] >= summary["pass@1"] == pytest.approx(summary["success"])
    with pytest.raises(ConfigError, match=r"pass@4 with num_attempts 3"):
        load_config(evaluate.Config, [f"--model={BASE}", "--num-attempts=3", "--pass-at=1,4"])


def conversations(path: Path) -> Path:
    call = {
        "type": "function",
        "function": {"name": "code_executor", "arguments": '{"line": 2, "code": "    x"}'},
    }
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"fix {n}"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        }
        for n in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sft_lowers_the_loss_and_resuming_changes_nothing(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data.jsonl")
    common = [
        f"--model={BASE}",
        f"--data={data}",
        "--batch=4",
        f"--run.root={tmp_path}",
        "--optimizer.lr=1e-3",
    ]
    sft.run(load_config(sft.Config, [*common, "--run.name=whole", "--epochs=2"]))
    sft.run(load_config(sft.Config, [*common, "--run.name=parts", "--epochs=1"]))
    parts = tmp_path / "parts"
    sft.run(load_config(sft.Config, ["@", str(parts / "config.toml"), f"--resume={parts}", "--epochs=2"]))
    nll = {
        name: [row["train/nll"] for row in read_metrics(tmp_path / name).rows] for name in ("whole", "parts")
    }
    assert len(nll["whole"]) == 6
    assert nll["whole"] == nll["parts"]
    assert nll["whole"][-1] < nll["whole"][0]
    shutil.rmtree(parts / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        sft.run(load_config(sft.Config, ["@", str(parts / "config.toml"), f"--resume={parts}"]))


def test_sft_reads_lines_by_line_feeds_only(tmp_path: Path) -> None:
    """JSON text may hold U+2028 or NEL as they are, and a file may begin with a byte order mark."""
    data = tmp_path / "data.jsonl"
    row = {"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "d"}]}
    data.write_text("\ufeff" + (json.dumps(row, ensure_ascii=False) + "\n") * 2, encoding="utf-8")
    assert len(sft.read_conversations(data, load_renderer(BASE), 0)) == 2
    data.write_bytes(data.read_bytes() + b'{"messages": "\xff"}\n')
    with pytest.raises(TaskFileError, match=r"data.jsonl:3: UnicodeDecodeError"):
        sft.read_conversations(data, load_renderer(BASE), 0)


def test_sft_names_the_bad_line(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data.jsonl")
    data.write_text(
        data.read_text() + '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n'
    )
    with pytest.raises(UniAgentError, match=r"data.jsonl:11: .*image_url"):
        sft.run(load_config(sft.Config, [f"--model={BASE}", f"--data={data}", f"--run.root={tmp_path}"]))


def test_ctrl_c_saves_and_names_the_command_that_resumes(tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uni_agent", "train", "grpo"]
    more = (
        "--steps=1000",
        "--group-size=2",
        "--groups-per-step=2",
        "--held-out.tasks=[]",
        "--run.save-every=0",
    )
    process = subprocess.Popen(
        command + settings(tasks, tmp_path, *more), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs/x/metrics.jsonl"
    for _ in range(600):
        if process.poll() is not None or (metrics.exists() and metrics.stat().st_size):
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"go on with: uni-agent train grpo --resume {tmp_path}/runs/x" in said
    assert list((tmp_path / "runs/x/checkpoints").glob("step_*"))


@pytest.mark.parametrize("wrong", ["--world.tools=['code_executer']", "--world.reward=code_test_pass_rat"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_misspelt_tool_or_reward_is_known_before_anything_is_made(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, more: tuple[str, ...]
) -> None:
    assert main(["train", "grpo", *settings(tasks, tmp_path, wrong, *more)]) == 2
    assert "code_" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    runs = [f"--runs={tmp_path}/runs", f"--model={BASE}", f"--tasks={tasks}", "--num-tasks=0"]
    assert main(["eval", *runs, wrong, *more]) == 2
    assert not (tmp_path / "runs").exists()


def test_a_step_without_a_difference_is_said_once(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Almost greedy: both episodes of a group are the same."""
    more = ("--steps=2", "--group-size=2", "--groups-per-step=2", "--sampling.temperature=1e-6")
    grpo.run(load_config(grpo.Config, settings(tasks, tmp_path, *more)))
    shown = capsys.readouterr().out
    assert shown.count("all groups have equal rewards") == 1
    assert f"uni-agent show {tmp_path}/runs/x" in shown.replace("\n", "")


def test_the_engine_section_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, object] = {}
    monkeypatch.setattr(engine, "LocalEngine", lambda module, **settings: taken.update(settings))
    model, renderer = HFAutoModel.from_pretrained(BASE), load_renderer(BASE)
    given = EngineConfig(dtype="bfloat16", cache_gib=0.5, native=False, batch_invariant=True)
    engine.make_engine(given, model, renderer, max_running=3, seed=4)
    wanted = {"dtype": torch.bfloat16, "cache_bytes": 2**29, "native": False, "batch_invariant": True}
    assert {name: taken[name] for name in wanted} == wanted
    engine.make_engine(EngineConfig(), model, renderer, max_running=3, seed=4)
    assert {name: taken[name] for name in wanted} == dict.fromkeys(wanted, None) | {"batch_invariant": False}
    assert (taken["max_running"], taken["seed"]) == (3, 4)


def test_an_evaluation_that_scored_nothing_fails_after_it_kept_its_episodes(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_reward.py").write_text("def unsure(episode):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = [f"--model={BASE}", f"--tasks={tasks}", "--num-tasks=0", "--sampling.max-tokens=8"]
    words += ["--world.reward=no_reward:unsure", f"--runs={tmp_path}/runs", "--run=x"]
    assert main(["eval", *words]) != 0
    assert "none of 4 episodes could be scored" in capsys.readouterr().err
    assert len(EpisodeStore(tmp_path / "runs/x").read(0, split="eval")) == 4
