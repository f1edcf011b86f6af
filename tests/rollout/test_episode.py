"""Whatever happens in an episode becomes a typed, labelled record."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from uni_agent.errors import EngineError, EnvironmentFailure, RunError, SandboxError, ToolError
from uni_agent.protocols import ChatRequest, Environment, Policy, Scores, StepResult
from uni_agent.rollout import EpisodeRunner, episode_id
from uni_agent.testing import EchoEnvironment, Scripted, ScriptedEngine
from uni_agent.types import EndReason, Episode, Message, Task, ToolResult

MakeRunner = Callable[..., EpisodeRunner]


async def play(runner: EpisodeRunner, task: Task, number: int = 0) -> Episode:
    return await runner.run(task, episode_id=episode_id(0, task.id, number), seed=number)


@dataclass(frozen=True, slots=True)
class RaisingAgent:
    """Makes one turn, then raises."""

    error: BaseException

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        messages = await env.reset(task)
        reply = await policy.chat(ChatRequest(messages))
        await env.step(reply.message, ())
        raise self.error


async def test_a_played_episode_holds_everything(make_runner: MakeRunner, task: Task) -> None:
    class World(EchoEnvironment):
        async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
            result = await super().step(message, tool_results)
            return StepResult(
                result.messages,
                0.5,
                self.steps == 2,
                artifacts={"answer.py": f"{self.steps}".encode()},
                metrics={"env/tests": self.steps},
            )

    env = World()
    engine = ScriptedEngine([Scripted([19, 2])] * 2)
    episode = await play(make_runner(engine=engine, make_env=lambda: env), task)
    assert (episode.id, episode.end, episode.error, episode.trainable) == ("0/t/0", "done", None, True)
    assert (episode.reward, episode.rewards) == (1.0, {"env": 1.0})
    assert [turn.reward for turn in episode.trajectories[0].turns] == [0.5, 0.5]
    assert episode.artifacts == {"answer.py": b"2"}
    assert episode.metrics["env/tests"] == 2
    assert episode.metrics["rollout/sampled_tokens"] == 4
    assert (env.starts, env.steps, env.stops) == (1, 2, 1)
    assert engine.sessions_ended == ["0/t/0"]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ValueError("oops"), "agent_error"),
        (ToolError("oops"), "tool_error"),
        (SandboxError("oops"), "sandbox_error"),
        (EngineError("oops"), "engine_error"),
        (EnvironmentFailure("oops"), "env_error"),
        (ExceptionGroup("tools", [SandboxError("oops")]), "sandbox_error"),
        (TimeoutError("oops"), "agent_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_errors_are_labelled_and_never_scored(
    make_runner: MakeRunner, task: Task, error: Exception, end: str, constant_reward: Any
) -> None:
    env = EchoEnvironment()
    runner = make_runner(agent=RaisingAgent(error), make_env=lambda: env, reward=constant_reward(1.0))
    episode = await play(runner, task)
    assert episode.end == end
    assert episode.reward is None
    assert episode.reward_reason
    assert episode.num_turns == 1  # what was played is kept
    assert env.stops == 1
    first_line, *trace = (episode.error or "").splitlines()
    assert first_line.startswith(type(error).__name__)
    assert any("test_episode.py" in line for line in trace)


@pytest.mark.parametrize("where", ["make", "reset", "step"])
async def test_a_broken_world_is_an_env_error(make_runner: MakeRunner, task: Task, where: str) -> None:
    class BrokenReset(EchoEnvironment):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            raise KeyError("no such world")

    def broken() -> Environment:
        raise KeyError("no such world")

    worlds: dict[str, Callable[[], Environment]] = {
        "make": broken,
        "reset": BrokenReset,
        "step": lambda: EchoEnvironment(fail_at=2),
    }
    episode = await play(make_runner(make_env=worlds[where]), task)
    assert episode.end == "env_error"
    assert episode.num_turns == (2 if where == "step" else 0)
    assert episode.reward is None


async def test_an_agent_that_hides_the_worlds_failure_does_not_hide_it(
    make_runner: MakeRunner, task: Task
) -> None:
    class Deaf:
        async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
            messages = await env.reset(task)
            try:
                await env.step((await policy.chat(ChatRequest(messages))).message, ())
            except RuntimeError:
                return "done"
            return "max_turns"

    runner = make_runner(agent=Deaf(), make_env=lambda: EchoEnvironment(fail_at=1))
    assert (await play(runner, task)).end == "env_error"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
async def test_a_step_reward_that_is_no_number_is_an_env_error(
    make_runner: MakeRunner, task: Task, reward: Any
) -> None:
    class World(EchoEnvironment):
        async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
            return StepResult((), reward)

    episode = await play(make_runner(make_env=World), task)
    assert (episode.end, episode.reward) == ("env_error", None)
    assert episode.trajectories[0].turns[0].reward is None


async def test_an_unknown_end_reason_is_the_agents_error(make_runner: MakeRunner, task: Task) -> None:
    class Odd:
        async def run(self, task: Task, env: Environment, policy: Policy) -> Any:
            return "finished"

    episode = await play(make_runner(agent=Odd()), task)
    assert episode.end == "agent_error"
    assert "'finished'" in (episode.error or "")


async def test_context_and_budget_end_an_episode_as_truncated(
    make_runner: MakeRunner, task: Task, constant_reward: Any
) -> None:
    script = [Scripted([19] * 9)] * 3
    full = await play(
        make_runner(engine=ScriptedEngine(script, context_size=24), reward=constant_reward(0.5)), task
    )
    assert (full.end, full.truncated, full.num_turns, full.reward) == ("context_full", True, 1, 0.5)
    spent = await play(make_runner(engine=ScriptedEngine(script), max_tokens=15), task)
    assert (spent.end, spent.num_turns) == ("max_tokens", 2)
    assert spent.trajectories[0].turns[1].finish == "length"


@pytest.mark.parametrize(("length", "rows"), [(6, 1), (8, 1), (9, 0)])
async def test_x01_a_prompt_over_the_limit_is_skipped_and_counted(
    make_runner: MakeRunner, length: int, rows: int, constant_reward: Any
) -> None:
    class OneTurn:
        async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
            await policy.chat(ChatRequest(await env.reset(task)))
            return "done"

    # the toy prompt is 8 ids and the text: shorten the window instead of the prompt
    content = "x" * max(length - 8, 0)
    size = len(content) + 8
    engine = ScriptedEngine([Scripted([19, 2])], context_size=9 + size - length)
    task = Task("p", (Message("user", content),))
    episode = await play(make_runner(agent=OneTurn(), engine=engine, reward=constant_reward(1.0)), task)
    assert len(episode.trajectories) == len(engine.prompts) == rows
    assert episode.metrics["rollout/skipped_overlong"] == 1 - rows
    if not rows:
        assert (episode.end, episode.reward) == ("context_full", None)
        assert "0/p/0" in (episode.error or "")
        assert f"{size} tokens" in (episode.error or "")


async def test_x04_empty_responses_count_and_add_no_tokens(
    make_runner: MakeRunner, talk: Any, constant_reward: Any
) -> None:
    sampled: list[int] = []
    for ids in ([19, 2], [], [2], [20, 2]):
        task = Task("t", (Message("user", "q"),))
        engine = ScriptedEngine([Scripted(ids)])
        runner = make_runner(agent=talk(1), engine=engine, reward=constant_reward(0.0))
        episode = await play(runner, task)
        assert (episode.end, episode.reward) == ("max_turns", 0.0)
        sampled.append(int(episode.trajectories[0].sampled.sum()))
        assert episode.metrics["rollout/sampled_tokens"] == sampled[-1]
    assert sampled == [2, 0, 1, 2]


async def test_r02_a_reward_that_raises_is_never_a_zero(make_runner: MakeRunner, talk: Any) -> None:
    async def reward(episode: Episode, context: Any) -> Scores:
        if episode.seed == 1:
            raise ValueError("no verdict")
        return Scores({"r": 0.0 if episode.seed == 2 else 1.0})

    task = Task("t", (Message("user", "q"),))
    runner = make_runner(agent=talk(1), reward=reward)
    episodes = [await play(runner, task, number) for number in range(4)]
    assert [episode.reward for episode in episodes] == [1.0, None, 0.0, 1.0]
    assert [episode.end for episode in episodes].count("reward_error") == 1
    bad = episodes[1]
    assert bad.rewards == {}
    assert "ValueError: no verdict" in (bad.error or "")
    assert "in reward" in (bad.error or "")  # the traceback
    with pytest.raises(RunError, match="0/t/1 ended reward_error"):
        await play(make_runner(agent=talk(1), reward=reward, fail_fast=True), task, 1)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (True, (1.0, "max_turns")),
        (np.float32(0.5), (0.5, "max_turns")),
        (np.bool_(True), (1.0, "max_turns")),
        (np.int64(2), (2.0, "max_turns")),
        (None, (None, "max_turns")),
        (float("nan"), (None, "max_turns")),
        ("1.0", (None, "reward_error")),
        (float("inf"), (None, "reward_error")),
        ([1.0], (None, "reward_error")),
        (np.array([1.0]), (None, "reward_error")),
    ],
    ids=repr,
)
async def test_a_reward_is_a_number_or_not_scored(
    make_runner: MakeRunner, task: Task, constant_reward: Any, value: Any, right: Any
) -> None:
    episode = await play(make_runner(reward=constant_reward(value)), task)
    reward, end = right
    assert (episode.reward, episode.end) == (reward, end)
    assert type(episode.reward) is type(reward)
    assert (episode.reward_reason is None) == (reward is not None)
    if end == "reward_error":
        assert "'constant'" in (episode.error or "")
        assert "0/t/0" in (episode.error or "")


async def test_step_scores_land_in_their_turns(make_runner: MakeRunner, task: Task, talk: Any) -> None:
    async def reward(episode: Episode, context: Any) -> Scores:
        return Scores({"r": 0.75}, {"gain": [0.5, 0.25]})

    episode = await play(make_runner(agent=talk(2), reward=reward), task)
    assert episode.reward == 0.75
    assert [turn.reward for turn in episode.trajectories[0].turns] == [0.5, 0.25]
    bad = await play(make_runner(agent=talk(3), reward=reward), task)
    assert bad.end == "reward_error"
    assert "2 step values for 3 turns" in (bad.error or "")


async def test_an_invalid_episode_keeps_its_reason(make_runner: MakeRunner, task: Task) -> None:
    async def reward(episode: Episode, context: Any) -> Scores:
        return Scores(invalid="the judge was cut off")

    episode = await play(make_runner(reward=reward), task)
    assert (episode.reward, episode.reward_reason) == (None, "the judge was cut off")
    assert episode.end == "max_turns"


async def test_the_reward_runs_after_the_world_was_closed(make_runner: MakeRunner, task: Task) -> None:
    env = EchoEnvironment()
    seen: list[int] = []

    async def reward(episode: Episode, context: Any) -> Scores:
        seen.append(env.stops)
        return Scores({"r": 1.0})

    await play(make_runner(make_env=lambda: env, reward=reward), task)
    assert seen == [1]


async def test_a_time_out_keeps_the_turns(make_runner: MakeRunner, task: Task) -> None:
    class Hanging(EchoEnvironment):
        async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
            if self.steps == 1:
                await asyncio.Event().wait()
            return await super().step(message, tool_results)

    env = Hanging()
    episode = await play(make_runner(make_env=lambda: env, timeout_s=0.1), task)
    assert (episode.end, episode.truncated, episode.num_turns, env.stops) == ("timeout", True, 2, 1)


async def test_a_reset_that_never_ends_is_the_worlds_fault(make_runner: MakeRunner, task: Task) -> None:
    class Stuck(EchoEnvironment):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            await asyncio.Event().wait()
            return ()

    env = Stuck()
    episode = await play(make_runner(make_env=lambda: env, timeout_s=0.1), task)
    assert (episode.end, env.stops) == ("env_error", 1)


async def test_cancellation_is_recorded_and_goes_on(make_runner: MakeRunner, task: Task) -> None:
    env = EchoEnvironment()
    engine = ScriptedEngine([Scripted([19, 2])] * 9, latency_s=0.05)
    kept: list[Episode] = []
    runner = make_runner(engine=engine, make_env=lambda: env, on_cancelled=kept.append)
    running = asyncio.create_task(play(runner, task))
    await asyncio.sleep(0.08)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(episode.end, episode.num_turns, episode.reward) for episode in kept] == [("cancelled", 1, None)]
    assert env.stops == 1
    assert engine.sessions_ended == ["0/t/0"]


async def test_a_cancellation_from_within_is_only_data(make_runner: MakeRunner, task: Task) -> None:
    episode = await play(make_runner(agent=RaisingAgent(asyncio.CancelledError())), task)
    assert (episode.end, episode.reward) == ("cancelled", None)


async def test_s08_a_failing_close_skips_nothing_and_replaces_nothing(
    make_runner: MakeRunner, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    class BadClose(EchoEnvironment):
        async def close(self) -> None:
            raise OSError("will not close")

    engine = ScriptedEngine([Scripted([19, 2])] * 3)
    with caplog.at_level(logging.WARNING):
        episode = await play(make_runner(engine=engine, make_env=BadClose), task)
    assert (episode.end, episode.reward, episode.error) == ("max_turns", 0.0, None)
    assert engine.sessions_ended == ["0/t/0"]  # the second cleanup ran
    assert episode.metrics["rollout/close_errors"] == 1
    assert sum("will not close" in record.message for record in caplog.records) == 1


async def test_s11_episodes_share_nothing_mutable(make_runner: MakeRunner, talk: Any) -> None:
    class Writer(EchoEnvironment):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            self.own = id(self)
            self.info = task.data["info"]
            self.info["n"] += 1
            self.info["who"] = self.own
            await asyncio.sleep(0.01)
            return task.prompt

        async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
            return StepResult(reward=float(self.info["who"] == self.own == id(self)), terminated=True)

    before = dict(os.environ)
    row = Task("t", (Message("user", "q"),), {"info": {"n": 0}})
    runner = make_runner(agent=talk(1), make_env=Writer)
    episodes = await asyncio.gather(*(play(runner, row, number) for number in range(8)))
    assert [episode.reward for episode in episodes] == [1.0] * 8
    assert [episode.task.data["info"]["n"] for episode in episodes] == [1] * 8
    assert row.data == {"info": {"n": 0}}
    assert dict(os.environ) == before
