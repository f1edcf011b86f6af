"""Groups run ahead by a bounded staleness, in order; nothing hangs and nothing is left running."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from uni_agent.errors import EngineError, RunError, UsageError
from uni_agent.protocols import ChatRequest, Environment, Policy
from uni_agent.rollout import (
    EpisodeRunner,
    GroupPool,
    StepFailed,
    drop_stale,
    rollout_metrics,
    run_many,
)
from uni_agent.testing import EchoEnvironment, Scripted, ScriptedEngine
from uni_agent.types import (
    EndReason,
    Episode,
    Group,
    Message,
    Sampling,
    Task,
    Trajectory,
    Turn,
    Weights,
    derive_seed,
)

MakeRunner = Callable[..., EpisodeRunner]


def many(count: int | None = None) -> Iterator[Task]:
    number = 0
    while count is None or number < count:
        yield Task(f"t{number}", (Message("user", "q"),))
        number += 1


def fake_episode(episode_id: str, version: int | None, end: EndReason = "done") -> Episode:
    """An episode with one sampled token of `version`, or with none."""
    task = Task("t", ())
    if version is None:
        return Episode(episode_id, task, (), end)
    turn = Turn((0, 0), (0, 1), (), Message("assistant"), "stop", Sampling())
    arrays = (np.int32([19]), np.ones(1, bool), np.float32([-0.5]), np.int32([version]))
    row = Trajectory("main", *arrays, (turn,))
    return Episode(episode_id, task, (row,), end)


class FakeRun:
    """Samples with the live version after a random while; counts what runs at the same time."""

    def __init__(self, seed: int = 0) -> None:
        self.version = 0
        self.running = 0
        self.most = 0
        self.started: list[str] = []
        self.seeds: dict[str, int] = {}
        self._random = random.Random(seed)

    async def __call__(self, task: Task, *, episode_id: str, seed: int) -> Episode:
        self.started.append(episode_id)
        self.seeds[episode_id] = seed
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            version = self.version
            await asyncio.sleep(self._random.random() * 0.005)
            return replace(fake_episode(episode_id, version), task=task, seed=seed)
        finally:
            self.running -= 1


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_w02_no_token_is_older_than_max_staleness(staleness: int) -> None:
    run = FakeRun()
    lags: list[int] = []
    async with GroupPool(
        run=run, tasks=many(), group_size=2, groups_per_step=3, max_staleness=staleness
    ) as pool:
        for step in range(8):
            groups = await pool.next_step()
            assert [group.id for group in groups] == [f"{step}/t{step * 3 + place}" for place in range(3)]
            lags += [step - (episode.oldest_version or 0) for g in groups for episode in g.episodes]
            await asyncio.sleep(0.004)
            run.version = step + 1
            pool.weights_live(step + 1)
    assert max(lags) == staleness  # the bound holds, and is used
    assert pool.counts["stale"] == 0
    assert pool.position == 24
    assert run.running == 0


@pytest.mark.parametrize(("allowed", "kept"), [(0, [5]), (1, [5, 4]), (2, [5, 4, 3])])
def test_w02_accepted_lags(allowed: int, kept: list[int]) -> None:
    groups = [Group(f"g{v}", (fake_episode(f"e{v}", v),)) for v in (5, 4, 3, 2)]
    fresh, dropped = drop_stale(groups, 5, allowed)
    assert [group.episodes[0].oldest_version for group in fresh] == kept
    assert dropped == 4 - len(kept)


async def test_w02_stale_episodes_are_sampled_again_so_that_the_step_is_full() -> None:
    run = FakeRun()
    async with GroupPool(run=run, tasks=many(), group_size=2, groups_per_step=2, max_staleness=1) as pool:
        await pool.next_step()
        await asyncio.sleep(0.02)  # step 1 was sampled with version 0
        run.version = 3
        pool.weights_live(3)  # three updates in one step
        groups = await pool.next_step()
    assert [len(group.episodes) for group in groups] == [2, 2]
    assert {episode.oldest_version for group in groups for episode in group.episodes} == {3}
    assert pool.counts["stale"] == len(pool.take_lost()) == 4
    assert len({episode.id for group in groups for episode in group.episodes}) == 4


async def test_an_engine_that_stays_behind_is_an_error() -> None:
    async with GroupPool(run=FakeRun(), tasks=many(), group_size=1, groups_per_step=1) as pool:
        await pool.next_step()
        pool.weights_live(1)
        with pytest.raises(RunError, match="did not take the new weights"):
            await pool.next_step()


async def test_admission_waits_for_live_weights() -> None:
    run = FakeRun()
    async with GroupPool(run=run, tasks=many(), group_size=1, groups_per_step=2, max_staleness=0) as pool:
        pool.weights_live(0)  # the first announcement frees nothing
        await pool.next_step()
        await asyncio.sleep(0.02)
        assert len(run.started) == 2
        with pytest.raises(UsageError, match="weights_live"):
            await pool.next_step()
        run.version = 2
        pool.weights_live(1)
        pool.weights_live(2)  # nor does a second one in the same step
        await asyncio.sleep(0.02)
        assert len(run.started) == 4
        with pytest.raises(RunError, match="only rise"):
            pool.weights_live(1)


async def test_concurrency_is_bounded_and_tasks_may_end() -> None:
    run = FakeRun()
    async with GroupPool(
        run=run, tasks=many(5), group_size=3, groups_per_step=2, max_staleness=1, max_concurrent_episodes=4
    ) as pool:
        sizes: list[int] = []
        while groups := await pool.next_step():
            sizes.append(len(groups))
            run.version = len(sizes)
            pool.weights_live(len(sizes))
    assert sizes == [2, 2, 1]
    assert run.most == 4
    assert pool.counts["episodes"] == 15


async def test_resume_goes_on_where_the_position_says() -> None:
    whole, part = FakeRun(1), FakeRun(2)
    settings: dict[str, Any] = {"group_size": 2, "groups_per_step": 2, "seed": 9}
    async with GroupPool(run=whole, tasks=many(8), **settings) as pool:
        for version in range(1, 5):
            await pool.next_step()
            whole.version = version
            pool.weights_live(version)
    async with GroupPool(run=part, tasks=many(8), position=4, **settings) as pool:
        for version in range(3, 5):
            await pool.next_step()
            part.version = version
            pool.weights_live(version)
        assert await pool.next_step() == []
    assert part.seeds == {key: seed for key, seed in whole.seeds.items() if key[0] in "23"}
    assert whole.seeds["2/t4/1"] == derive_seed(9, 2, "t4", 1)
    assert len(whole.seeds) == len(set(whole.seeds.values())) == 16


async def test_a_task_that_comes_twice_in_a_step_has_ids_of_its_own() -> None:
    run = FakeRun()
    task = Task("t", ())
    async with GroupPool(run=run, tasks=[task] * 4, group_size=2, groups_per_step=2) as pool:
        groups = await pool.next_step()
    assert [group.id for group in groups] == ["0/t", "0/t#1"]
    assert sorted(run.started) == ["0/t/0", "0/t/1", "0/t/2", "0/t/3"]


async def test_retries_are_bounded_and_counted(make_runner: MakeRunner) -> None:
    good = Scripted([19, 2])
    engine = ScriptedEngine([EngineError("down")] * 2 + [good] * 9)
    runner = make_runner(engine=engine)
    async with GroupPool(
        run=runner.run, tasks=many(2), group_size=2, groups_per_step=1, max_concurrent_episodes=1
    ) as pool:
        (group,) = await pool.next_step()
    assert [episode.end for episode in group.episodes] == ["max_turns", "max_turns"]
    assert [episode.id for episode in group.episodes] == ["0/t0/0+2", "0/t0/1"]
    assert (pool.counts["retried"], pool.counts["engine_error"]) == (2, 2)
    lost = pool.take_lost()
    assert [episode.id for episode in lost] == ["0/t0/0", "0/t0/0+1"]
    assert pool.take_lost() == []


async def test_agent_errors_are_not_repeated(make_runner: MakeRunner) -> None:
    class Once:
        def __init__(self) -> None:
            self.runs = 0

        async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
            self.runs += 1
            if self.runs == 1:
                raise ValueError("bug")
            await policy.chat(ChatRequest(await env.reset(task)))
            return "done"

    agent = Once()
    async with GroupPool(
        run=make_runner(agent=agent).run, tasks=many(), group_size=3, groups_per_step=1
    ) as p:
        (group,) = await p.next_step()
    assert agent.runs == 3
    assert Counter(episode.end for episode in group.episodes) == {"agent_error": 1, "done": 2}


async def test_s01a_a_step_of_failures_is_an_error_that_names_the_first(make_runner: MakeRunner) -> None:
    runner = make_runner(make_env=lambda: EchoEnvironment(fail_at=1))
    async with GroupPool(run=runner.run, tasks=many(), group_size=2, groups_per_step=2) as pool:
        with pytest.raises(
            StepFailed, match=r"all 4 episodes of step 0 .* env_error: RuntimeError"
        ) as caught:
            await asyncio.wait_for(pool.next_step(), 5)
    assert caught.value.exit_code == 1
    assert len(caught.value.groups) == 2
    assert pool.position == 0


async def test_s01b_episodes_that_never_return_time_out_and_the_step_goes_on(make_runner: MakeRunner) -> None:
    class Some:
        async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
            messages = await env.reset(task)
            if task.id in ("t3", "t64", "t127"):
                await asyncio.Event().wait()
            await policy.chat(ChatRequest(messages))
            return "done"

    runner = make_runner(agent=Some(), timeout_s=0.5)
    async with GroupPool(run=runner.run, tasks=many(128), group_size=1, groups_per_step=128) as pool:
        groups = await asyncio.wait_for(pool.next_step(), 10)
    assert Counter(group.episodes[0].end for group in groups) == {"done": 125, "timeout": 3}
    assert pool.counts["timeout"] == 3
    assert rollout_metrics(groups)["rollout/end_timeout"] == 3


async def test_s01c_a_task_source_that_dies_is_an_error() -> None:
    def source() -> Iterator[Task]:
        yield from many(2)
        raise OSError("the disk went away")

    async with GroupPool(run=FakeRun(), tasks=source(), group_size=1, groups_per_step=2) as pool:
        assert len(await pool.next_step()) == 2
        pool.weights_live(1)
        with pytest.raises(RunError, match="the disk went away"):
            await asyncio.wait_for(pool.next_step(), 5)


async def test_a_runner_that_raises_stops_the_step_at_once() -> None:
    async def run(task: Task, *, episode_id: str, seed: int) -> Episode:
        if task.id == "t1":
            raise ZeroDivisionError("a bug")
        await asyncio.Event().wait()
        raise AssertionError

    async with GroupPool(run=run, tasks=many(), group_size=2, groups_per_step=2) as pool:
        with pytest.raises(RunError, match="ZeroDivisionError: a bug"):
            await asyncio.wait_for(pool.next_step(), 5)


async def test_s08_leaving_the_pool_ends_all_tasks_whatever_state_they_are_in(
    make_runner: MakeRunner,
) -> None:
    worlds: list[EchoEnvironment] = []

    class Stubborn(EchoEnvironment):
        """The first to close fails, the others must close all the same."""

        async def close(self) -> None:
            await super().close()
            if self is worlds[0]:
                raise OSError("close failed")

    def world() -> Environment:
        worlds.append(Stubborn(fail_at=1 if len(worlds) == 1 else None))
        return worlds[-1]

    engine = ScriptedEngine(lambda *_: Scripted([19, 2]), latency_s=0.05)
    before = asyncio.all_tasks()
    run = make_runner(engine=engine, make_env=world).run

    async def body() -> None:
        async with GroupPool(run=run, tasks=many(), group_size=2, groups_per_step=4):
            await asyncio.sleep(0.12)
            raise LookupError("the body's own")

    with pytest.raises(LookupError, match="the body's own"):
        await body()
    assert asyncio.all_tasks() == before
    assert len(worlds) >= 8
    assert [world.stops for world in worlds] == [1] * len(worlds)
    assert len(engine.sessions_ended) == len(worlds)


async def test_a_cancelled_body_leaves_nothing_running() -> None:
    run = FakeRun()

    async def body() -> None:
        async with GroupPool(run=run, tasks=many(), group_size=2, groups_per_step=2) as pool:
            version = 0
            while await pool.next_step():
                version += 1
                run.version = version
                pool.weights_live(version)

    running = asyncio.create_task(body())
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert run.running == 0
    assert len(run.started) > 4


async def test_versions_that_change_in_mid_episode_stay_within_the_bound(make_runner: MakeRunner) -> None:
    engine = ScriptedEngine(lambda *_: Scripted([19, 2]), latency_s=0.002)
    runner = make_runner(engine=engine)
    async with GroupPool(
        run=runner.run, tasks=many(), group_size=2, groups_per_step=2, max_staleness=1
    ) as pool:
        for step in range(4):
            groups = await pool.next_step()
            for group in groups:
                assert all(step - (e.oldest_version or 0) <= 1 for e in group.episodes)
            await engine.load_weights(Weights(step + 1, None))
            pool.weights_live(step + 1)


async def test_run_many_spreads_evenly_and_keeps_the_order() -> None:
    run = FakeRun()
    seen: list[tuple[int, int]] = []
    episodes = await run_many(
        run,
        list(many(3)),
        num_episodes=8,
        concurrency=3,
        progress=lambda done, total, episode: seen.append((done, total)),
    )
    ids = ["0/t0/0", "0/t0/1", "0/t0/2", "0/t1/0", "0/t1/1", "0/t1/2", "0/t2/0", "0/t2/1"]
    assert [episode.id for episode in episodes] == ids
    assert seen == [(done, 8) for done in range(1, 9)]
    assert run.most == 3
    with pytest.raises(UsageError, match="empty"):
        await run_many(run, [], num_episodes=1)


async def test_run_many_names_what_broke() -> None:
    async def run(task: Task, *, episode_id: str, seed: int) -> Episode:
        raise ZeroDivisionError("a bug")

    with pytest.raises(RunError, match="ZeroDivisionError: a bug"):
        await run_many(run, list(many(3)), num_episodes=3)


def test_metrics_count_what_is_missing() -> None:
    episodes = [
        replace(fake_episode("a", 0), reward=1.0, metrics={"env/x": 0.5}),
        replace(fake_episode("b", 0, "max_turns"), reward=0.0, metrics={"env/x": float("nan")}),
        fake_episode("c", None, "env_error"),
    ]
    metrics = rollout_metrics([Group("g", tuple(episodes[:2])), episodes[2]])
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/unscored"] == 1
    assert metrics["env/x_mean"] == 0.5
    assert metrics["rollout/end_env_error"] == 1
    assert (metrics["rollout/sampled_tokens_min"], metrics["rollout/sampled_tokens_max"]) == (0, 1)
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 3)
    assert "rollout/reward_mean" not in rollout_metrics(episodes[2:])
