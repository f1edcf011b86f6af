"""The front door: names that resolve or say why not, and a policy that rolls out, trains and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uni_agent import AgentPolicy, AgentRuntime, GRPOTrainer, PPOTrainer, RewardModel
from uni_agent.algos import group_counts
from uni_agent.api import TOOLS, _by_task, resolve_reward, resolve_tool  # pyright: ignore[reportPrivateUsage]
from uni_agent.errors import ConfigError, RunError, SandboxError, UnknownNameError, UsageError
from uni_agent.protocols import RewardContext, Sandbox
from uni_agent.rewards import code_test_pass_rate
from uni_agent.tools import CodeExecutor
from uni_agent.types import Episode, Message, Sampling, Task, Trajectory, Turn, derive_seed

BASE = Path(__file__).parents[1] / "examples/code_repair/base"
torch.set_num_threads(1)

MODULE = '''
def price(item: str) -> int:
    """Say what an item costs."""
    return 3

def half(episode):
    return 0.5

number = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, with a tool and a reward in it, and three that break."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_raises.py").write_text("raise RuntimeError('first\\nsecond')\n")
    (tmp_path / f"{name}_syntax.py").write_text("def f(:\n")
    (tmp_path / f"{name}_lacks.py").write_text("import nobody_has_this_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_shipped_names_functions_classes_and_objects_become_tools(module: str) -> None:
    for name in TOOLS:
        assert resolve_tool(name).spec.name == name
    assert resolve_tool(f"{module}:price").spec.name == "price"
    assert isinstance(resolve_tool(CodeExecutor), CodeExecutor)
    made = CodeExecutor()
    assert resolve_tool(made) is made


def test_shipped_names_and_functions_become_rewards(module: str) -> None:
    assert resolve_reward("code_test_pass_rate") is code_test_pass_rate
    assert resolve_reward(code_test_pass_rate) is code_test_pass_rate
    made = resolve_reward(f"{module}:half")
    context = RewardContext(None)  # type: ignore[arg-type]
    scores = asyncio.run(made(Episode("e", Task("t", ()), (), "done"), context))  # type: ignore[arg-type]
    assert dict(scores.values) == {"half": 0.5}


@pytest.mark.parametrize(
    ("resolve", "name", "kind", "near"),
    [
        (resolve_tool, "code_exekutor", "tool", "code_executor"),
        (resolve_reward, "code_test_pass_rat", "reward", "code_test_pass_rate"),
    ],
)
def test_an_unknown_name_says_the_nearest(resolve: Any, name: str, kind: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown {kind} '{name}'; did you mean '{near}'") as caught:
        resolve(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("resolve", [resolve_tool, resolve_reward])
@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        (":nothing", "has no attribute 'nothing'"),
        ("_missing:x", "No module named"),
        ("_raises:x", "first"),
        ("_syntax:f", "invalid syntax"),
        ("_lacks:f", "No module named 'nobody_has_this_module'"),
        (":", "has no attribute ''"),
    ],
)
def test_what_does_not_import_is_one_usage_error_line(
    module: str, resolve: Any, suffix: str, reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(module + suffix)
    message = str(caught.value)
    assert message.startswith(f"cannot import '{module}{suffix}': ")
    assert reason in message
    assert message.endswith("; expected module:attribute")
    assert "\n" not in message


def test_what_is_no_tool_or_reward_is_refused_at_once(module: str) -> None:
    for wrong in (f"{module}:number", 3, len, partial(len, "x")):
        with pytest.raises(UsageError, match="is no tool; expected a typed function"):
            resolve_tool(wrong)  # type: ignore[arg-type]
    for wrong in (f"{module}:number", 3):
        with pytest.raises(UsageError, match="3 is no reward; expected a function of an episode"):
            resolve_reward(wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def policy() -> Iterator[AgentPolicy]:
    made = AgentPolicy(BASE, ["code_executor"])
    yield made
    made.close()


def coin(episode: Episode) -> float:
    """A reward that differs within any group."""
    return float(derive_seed(0, episode.id) % 1000)


def test_eight_episodes_train_the_policy_in_place(policy: AgentPolicy) -> None:
    runtime = AgentRuntime(policy, "code_debug_env")
    before = [parameter.detach().clone() for parameter in policy.model.module.parameters()]
    episodes = asyncio.run(runtime.batch_rollout(["train-0-0", "train-0-1"], num_episodes=8))
    assert [e.task.id for e in episodes] == ["train-0-0"] * 4 + ["train-0-1"] * 4
    assert len({e.id for e in episodes}) == 8
    assert {e.oldest_version for e in episodes} == {0}
    scored = policy.background.wait(RewardModel("code_test_pass_rate").score(episodes, policy.sandbox))
    assert all(e.reward is not None and 0 <= e.reward <= 1 for e in scored)

    metrics = GRPOTrainer(policy, RewardModel(coin), minibatch=4).train(episodes)
    assert metrics["rollout/reward_mean"] == pytest.approx(np.mean([coin(e) for e in episodes]))
    assert metrics["train/updates"] == 2
    assert policy.version == 1  # published once, after both updates
    moved = [not torch.equal(a, b) for a, b in zip(before, policy.model.module.parameters(), strict=True)]
    assert any(moved)
    again = asyncio.run(runtime.batch_rollout(["train-0-0"]))
    assert [e.oldest_version for e in again] == [1]


def test_nothing_to_compare_is_an_error_and_the_policy_goes_on(policy: AgentPolicy) -> None:
    runtime = AgentRuntime(policy, "code_debug_env")
    version = policy.version
    episodes = asyncio.run(runtime.batch_rollout(["train-0-0", "train-0-1"]))
    trainer = GRPOTrainer(policy, RewardModel(coin))
    with pytest.raises(RunError, match="nothing can be trained"):
        trainer.train(episodes)
    with pytest.raises(UsageError, match="train got no episodes"):
        trainer.train([])
    assert policy.version == version
    assert len(asyncio.run(runtime.batch_rollout(["train-0-0"]))) == 1


def test_closing_twice_is_harmless_and_a_closed_policy_says_so() -> None:
    policy = AgentPolicy(BASE, ["code_executor"])
    runtime = AgentRuntime(policy, "code_debug_env")
    policy.close()
    policy.close()
    with pytest.raises(UsageError, match="the policy is closed"):
        asyncio.run(runtime.batch_rollout(["train-0-0"]))


def test_unknown_environments_and_tasks_are_named_at_once(policy: AgentPolicy) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'code_debug_env'"):
        AgentRuntime(policy, "code_debug_evn")
    with pytest.raises(UsageError, match="nowhere-1"):
        asyncio.run(AgentRuntime(policy, "code_debug_env").batch_rollout(["nowhere-1"]))


def test_a_tool_class_that_needs_arguments_is_refused_in_one_line() -> None:
    class Needs:
        def __init__(self, url: str) -> None:
            self.url = url

    with pytest.raises(UsageError, match=r"Needs'> cannot be made without arguments: .*'url'"):
        resolve_tool(Needs)


def test_a10_groups_are_by_task_whatever_the_order() -> None:
    order = [("A", 1.0), ("B", 0.0), ("A", 1.0), ("B", 0.0)]
    episodes = [
        Episode(f"{task}/{i}", Task(task, ()), (), "done", reward=r) for i, (task, r) in enumerate(order)
    ]
    groups = _by_task(episodes)
    assert [[e.reward for e in group.episodes] for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert group_counts(groups)["algos/groups_zero_variance"] == 2


def test_c07_a_sandbox_that_fails_while_scoring_is_no_reward_error() -> None:
    def broken() -> Sandbox:
        raise SandboxError("no disk")

    turn = Turn((0, 0), (0, 0), (), Message("assistant"), "stop", Sampling())
    none = np.zeros(0, np.int32)
    tape = Trajectory("main", none, none.astype(bool), none.astype(np.float32), none, (turn,))
    task = Task("t", (), {"tests": ["assert f() == 1"]})
    episode = Episode("t/0", task, (tape,), "done", artifacts={"solution.py": b"def f(): return 1"})
    (scored,) = asyncio.run(RewardModel("code_test_pass_rate").score([episode], broken))
    assert (scored.end, scored.reward) == ("sandbox_error", None)
    assert "no disk" in (scored.reward_reason or "")


@pytest.mark.parametrize("trainer", [PPOTrainer, GRPOTrainer])
def test_q09_a_negative_kl_coefficient_is_refused(policy: AgentPolicy, trainer: Any) -> None:
    with pytest.raises(ConfigError, match=r"the KL coefficient is -0.1"):
        trainer(policy, RewardModel(coin), kl_ctrl=-0.1)
