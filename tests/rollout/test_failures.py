"""Failures beneath an episode: prompts that do not fit, sandboxes that fail in grading, code that exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from uni_agent.algos import sequence_mean
from uni_agent.errors import EngineError, RunError, SandboxError
from uni_agent.protocols import ChatRequest, Environment, Policy, Scores, StepResult
from uni_agent.rollout import EpisodeRunner, GroupPool
from uni_agent.testing import EchoEnvironment, Scripted, ScriptedEngine
from uni_agent.types import EndReason, Episode, Message, Task, ToolResult

MakeRunner = Callable[..., EpisodeRunner]


class OneTurn:
    """Says one thing."""

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        await policy.chat(ChatRequest(await env.reset(task)))
        return "done"


class Raises:
    """Says one thing, then raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        await policy.chat(ChatRequest(await env.reset(task)))
        raise self.error


async def test_x01_an_overlong_prompt_gives_no_rows_and_the_others_are_as_they_were(
    make_runner: MakeRunner,
) -> None:
    """Prompts of 6, 8 and 9 ids against a limit of 8, in groups of two; the toy's framing takes 8 more."""
    engine = ScriptedEngine(lambda *_: Scripted([19]), context_size=8 + 8 + 1)
    tasks = [Task(f"p{n}", (Message("user", "x" * n),)) for n in (6, 8, 9)]
    run = make_runner(agent=OneTurn(), engine=engine).run
    async with GroupPool(run=run, tasks=tasks, group_size=2, groups_per_step=3) as pool:
        groups = await pool.next_step()
    assert [[len(e.trajectories) for e in group.episodes] for group in groups] == [[1, 1], [1, 1], [0, 0]]
    assert sorted(len(prompt) for prompt in engine.prompts) == [14, 14, 16, 16]  # none was shortened
    assert [[e.metrics["rollout/skipped_overlong"] for e in group.episodes] for group in groups] == [
        [0, 0], [0, 0], [1, 1]
    ]  # fmt: skip
    masks = [t.sampled for group in groups for e in group.episodes for t in e.trajectories]
    assert [float(w.sum()) for w in sequence_mean(masks)] == [0.25] * 4


async def test_c07_a_sandbox_that_fails_while_grading_costs_an_attempt_and_no_reward(
    make_runner: MakeRunner,
) -> None:
    graded: list[str] = []

    async def reward(episode: Episode, context: Any) -> Scores:
        graded.append(episode.id)
        if len(graded) == 1:
            raise SandboxError("no disk")
        return Scores({"r": 1.0})

    run = make_runner(reward=reward).run
    async with GroupPool(
        run=run,
        tasks=[Task("t0", (Message("user", "q"),))],
        group_size=2,
        groups_per_step=1,
        max_concurrent_episodes=1,
    ) as pool:
        (group,) = await pool.next_step()
    assert [(e.id, e.reward) for e in group.episodes] == [("0/t0/0+1", 1.0), ("0/t0/1", 1.0)]
    (lost,) = pool.take_lost()
    assert (lost.end, lost.reward) == ("sandbox_error", None)
    assert pool.counts["retried"] == 1


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (SandboxError("no disk"), "sandbox_error"),
        (EngineError("the judge is gone"), "engine_error"),
        (ExceptionGroup("all", [SandboxError("no disk")]), "sandbox_error"),
        (KeyError("bug"), "reward_error"),
        (SystemExit(3), "reward_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_c07_what_breaks_beneath_a_reward_is_not_the_rewards_fault(
    make_runner: MakeRunner, task: Task, error: BaseException, end: str
) -> None:
    async def reward(episode: Episode, context: Any) -> Scores:
        raise error

    episode = await make_runner(reward=reward).run(task, episode_id="0/t/0", seed=0)
    assert (episode.end, episode.reward, episode.num_turns) == (end, None, 3)
    assert "the reward raised" in (episode.reward_reason or "")


async def test_x01_fail_fast_names_the_prompt_that_does_not_fit(make_runner: MakeRunner) -> None:
    task = Task("p3", (Message("user", "x"),))
    runner = make_runner(engine=ScriptedEngine([], context_size=9), fail_fast=True)
    with pytest.raises(RunError, match=r"0/p3/0 ended context_full: .*has 9 tokens, the context holds 9"):
        await runner.run(task, episode_id="0/p3/0", seed=0)


@pytest.mark.parametrize("where", ["reset", "step", "agent"])
async def test_an_exit_in_somebody_elses_code_ends_the_episode_and_not_the_run(
    make_runner: MakeRunner, task: Task, where: str
) -> None:
    class Leaves(EchoEnvironment):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            if where == "reset":
                raise SystemExit(3)
            return await super().reset(task)

        async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
            if where == "step":
                raise SystemExit(3)
            return await super().step(message, tool_results)

    agent = Raises(SystemExit(3)) if where == "agent" else None
    episode = await make_runner(agent=agent, make_env=Leaves).run(task, episode_id="0/t/0", seed=0)
    assert episode.end == ("agent_error" if where == "agent" else "env_error")
    assert "SystemExit: 3" in (episode.error or "")


async def test_an_error_whose_text_cannot_be_read_is_data_too(make_runner: MakeRunner, task: Task) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    episode = await make_runner(agent=Raises(Mute())).run(task, episode_id="0/t/0", seed=0)
    assert episode.end == "agent_error"
    assert (episode.error or "").startswith("Mute (its text cannot be read)")
