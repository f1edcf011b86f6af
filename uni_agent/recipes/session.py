"""A training run, opened: model, learner, engine, runner, tasks, run directory; and what every training
recipe does between two steps (save, evaluate, show, stop). The algorithm itself stands in the recipe.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from uni_agent.engines.local import LocalEngine
from uni_agent.envs import EnvRegistry, TaskSet
from uni_agent.models import HFAutoModel, LoRA, count_parameters
from uni_agent.protocols import Loss, TokenScores
from uni_agent.recipes.engine import make_engine
from uni_agent.recipes.interrupt import Interrupt, Interrupted, interruptible, resume_hint
from uni_agent.recipes.measure import Report, attempt, held_out_figures, report, running_mean
from uni_agent.recipes.sections import (
    EngineConfig,
    HeldOutConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    WorldConfig,
)
from uni_agent.recipes.world import check_names, known_env, load_tasks, open_runner
from uni_agent.render import load_renderer
from uni_agent.rollout import EpisodeRunner, EpisodeStore, GroupPool, ScribeFactory, StepFailed
from uni_agent.track import LiveConsole, Run
from uni_agent.train.checkpoint import Checkpoints
from uni_agent.train.critic import TrunkCritic
from uni_agent.train.learner import LearnerConfig, TorchLearner
from uni_agent.types import Batch, Group, Weights


class TrainingConfig(Protocol):
    """What a recipe's Config must hold for a session; see `recipes.grpo.Config` for the meaning."""

    model: str
    renderer: str
    world: WorldConfig
    sampling: SamplingConfig
    engine: EngineConfig
    optimizer: OptimizerConfig
    held_out: HeldOutConfig
    run: RunConfig
    tasks: str
    num_tasks: int
    steps: int
    max_seconds: float
    group_size: int
    groups_per_step: int
    max_staleness: int
    entropy_coef: float
    seed: int
    resume: str


SHOWN = {
    "rollout/reward_mean": "reward",
    "rollout/turns_mean": "turns",
    "train/entropy": "entropy",
    "train/grad_norm": "grad",
    "time/rollout_s": "rollout_s",
    "time/update_s": "update_s",
}
"""The metrics of the live line."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything of one training run. Made by `open_session`."""

    recipe: str
    config: TrainingConfig
    record: Run
    live: LiveConsole
    learner: TorchLearner
    engine: LocalEngine
    runner: EpisodeRunner
    tasks: TaskSet
    held_out: Mapping[str, TaskSet]
    store: EpisodeStore
    checkpoints: Checkpoints
    interrupt: Interrupt
    began: float = field(default_factory=time.perf_counter)
    step: int = 0
    position: int = 0
    train_s: float = 0.0
    summary: dict[str, object] = field(default_factory=dict[str, object])
    _spent: dict[str, float] = field(default_factory=dict[str, float])
    _warned: bool = False

    def pool(self) -> GroupPool:
        """The pool of groups over the training tasks, at the place where the run stands."""
        config = self.config
        return GroupPool(
            run=self.runner.run,
            tasks=self.tasks.cycle(config.seed),
            group_size=config.group_size,
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            max_concurrent_episodes=config.world.concurrency,
            seed=config.seed,
            position=self.position,
        )

    async def steps(self, pool: GroupPool) -> AsyncIterator[int]:
        """Number the steps that are left; between two, save and evaluate where it is time to."""
        config = self.config
        total = config.steps
        seconds = config.max_seconds and max(0.0, config.max_seconds - self.train_s)
        self.live.phase("Training", total, seconds=seconds)
        while self.step < total and not 0 < config.max_seconds <= self.train_s:
            began = time.perf_counter()
            self._spent = {}
            yield self.step
            self.step += 1
            self.position = pool.position
            self.train_s += time.perf_counter() - began
            if config.run.save_every and self.step % config.run.save_every == 0:
                await asyncio.to_thread(self.save)
            if config.held_out.every and self.step % config.held_out.every == 0 and self.step < total:
                await self.engine.resume()
                await self.evaluate(f"step {self.step}")
            self.interrupt.check()

    async def next_groups(self, pool: GroupPool) -> list[Group]:
        """The groups of this step, stored. Raises Interrupted when Ctrl-C comes while waiting."""
        with self._timed("rollout"):
            try:
                groups = await self.interrupt.race(pool.next_step())
            except StepFailed as failed:
                self.store.write(self.step, failed.groups)
                raise
            await asyncio.to_thread(self.store.write, self.step, [*groups, *pool.take_lost()])
        return groups

    async def score(self, groups: Sequence[Group]) -> list[list[list[TokenScores]]]:
        """The learner's scores, in the shape of the groups."""
        flat = [t for group in groups for episode in group.episodes for t in episode.trajectories]
        with self._timed("score"):
            scores = iter(await asyncio.to_thread(self.learner.score, flat))
        return [[[next(scores) for _ in e.trajectories] for e in group.episodes] for group in groups]

    async def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step, outside the event loop.

        The first one of a step sees the policy that sampled: there, the distance between the learner's
        logprobs and the recorded ones is the engine's, `engine/logprob_gap` (mean) and its maximum.
        """
        first = "update" not in self._spent
        with self._timed("update"):
            metrics = dict(await asyncio.to_thread(self.learner.step, batch, loss))
        if first and "train/logprob_gap" in metrics:
            metrics["engine/logprob_gap"] = metrics["train/logprob_gap"]
            metrics["engine/logprob_gap_max"] = metrics["train/logprob_gap_max"]
        return metrics

    async def publish(self, pool: GroupPool) -> None:
        """Make the new weights live and let the pool admit the next groups."""
        await self.engine.load_weights(self.learner.publish())
        await self.engine.resume()
        pool.weights_live(self.learner.version)

    async def log(self, metrics: Mapping[str, float]) -> None:
        """Write the step's metrics and show its line."""
        times = {f"time/{name}_s": seconds for name, seconds in self._spent.items()}
        metrics = {**metrics, **times, **await self.engine.stats(), "train/version": self.learner.version}
        self.record.log(self.step, metrics)
        if (
            0 < metrics.get("algos/groups", 0) == metrics.get("algos/groups_zero_variance")
            and not self._warned
        ):
            self._warned = True
            self.live.note(
                f"step {self.step + 1}: all groups have equal rewards, so nothing can be learned from it"
            )
        reward = metrics.get("rollout/reward_mean")
        self.summary.setdefault("reward_first", reward)
        self.summary["reward_last"] = reward
        self.live.step(self.step + 1, {short: metrics[key] for key, short in SHOWN.items() if key in metrics})

    async def evaluate(self, when: str) -> dict[str, Report]:
        """Measure the held-out task sets, show and log them; the best checkpoint is kept."""
        found: dict[str, Report] = {}
        for name, tasks in self.held_out.items():
            self.live.phase(f"Held-out tasks {when}: {len(tasks)} of {name!r}", total_steps=len(tasks))
            episodes = await self.interrupt.race(
                attempt(
                    self.runner,
                    tasks,
                    concurrency=self.config.world.concurrency,
                    seed=self.config.seed,
                    progress=running_mean(self.live),
                )
            )
            found[name] = report(episodes, success_at=self.config.held_out.success_at)
            await asyncio.to_thread(self.store.write, self.step, episodes, split=_slug(name))
            success, first = found[name].success, found[name].first_turn
            self.live.note(f"{name}: solved {success}, in the first turn {first}")
            self.record.log(
                self.step, {f"eval/{name}/success": success.mean, f"eval/{name}/first_turn": first.mean}
            )
        main = next(iter(found.values()), None)
        # An evaluation in which no episode could be scored says nothing about what is best.
        if main is not None and when != "before" and not math.isnan(main.success.mean):
            self.checkpoints.save_best(self.step, self.learner.save, self._state(), score=main.success.mean)
        return found

    def save(self) -> Path:
        """Write a checkpoint of this moment."""
        return self.checkpoints.save(self.step, self.learner.save, self._state())

    async def finish(self, before: Mapping[str, Report], after: Mapping[str, Report]) -> Mapping[str, object]:
        """Save the last checkpoint and the model, and write the summary with the held-out figures.

        The first held-out task set gives `held_out_before`, `first_attempt_before` and so on; further
        sets carry their own name instead.
        """
        await asyncio.to_thread(self.save)
        folder = self.record.path / "model"
        await asyncio.to_thread(self.learner.model.save, folder)
        self.summary |= {
            **held_out_figures(before, "before"),
            **held_out_figures(after, "after"),
            "seconds": time.perf_counter() - self.began,
            "steps": self.step,
            "train_seconds": self.train_s,
            "version": self.learner.version,
            "model": str(folder),
            "run": str(self.record.path),
        }
        self.record.write_summary(self.summary)
        self.live.note(f"model in {folder}; look at an episode: uni-agent show {self.record.path}")
        return self.summary

    def _state(self) -> dict[str, object]:
        return {"step": self.step, "position": self.position, "train_s": self.train_s}

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        with self.record.span(name, self.step):
            yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began


@asynccontextmanager
async def open_session(
    recipe: str, config: Any, *, reference: bool = False, critic: bool = False
) -> AsyncGenerator[Session]:
    """Open everything that a training recipe needs; close it again, whatever happens.

    `reference` keeps the starting policy for a KL term, `critic` puts a value head on the trunk. With
    `config.resume` the latest complete checkpoint is loaded. On Ctrl-C a checkpoint is written and
    Interrupted raised with the command that resumes.
    """
    check_names(config.world)
    model = HFAutoModel.from_pretrained(
        config.model, lora=LoRA(r=config.optimizer.lora_rank) if config.optimizer.lora_rank else None
    )
    renderer = load_renderer(config.model, name=config.renderer or None)
    sampling = config.sampling.to_sampling()
    tasks = load_tasks(config.world, config.tasks, config.num_tasks, config.seed)
    learner = TorchLearner(
        model,
        LearnerConfig(
            optim=config.optimizer.to_optim(config.steps),
            microbatch_tokens=config.optimizer.microbatch_tokens,
        ),
        reference=model.fresh_reference() if reference else None,
        critic=TrunkCritic(model) if critic else None,
    )
    root, name = config.run.path_of(config.resume)
    engine = make_engine(
        config.engine, model, renderer, max_running=config.world.concurrency, seed=config.seed
    )
    try:
        with (
            Run.create(
                recipe,
                config,
                root=root,
                name=name,
                resume=bool(config.resume),
                trackers=config.run.trackers,
            ) as record,
            LiveConsole(every_s=5.0) as live,
            interruptible() as interrupt,
        ):
            async with open_runner(config.world, ScribeFactory(engine, renderer, sampling)) as runner:
                session = Session(
                    recipe=recipe,
                    config=config,
                    record=record,
                    live=live,
                    learner=learner,
                    engine=engine,
                    runner=runner,
                    tasks=tasks,
                    held_out=_held_out(config),
                    store=EpisodeStore(record.path),
                    checkpoints=Checkpoints(record.checkpoints_dir),
                    interrupt=interrupt,
                )
                if config.resume:
                    await _restore(session)
                try:
                    yield session
                except Interrupted:
                    await asyncio.to_thread(session.save)
                    raise Interrupted(resume_hint(recipe, record.path)) from None
    finally:
        await engine.close()


def plan_of(config: TrainingConfig) -> Mapping[str, object]:
    """Episodes, tokens and memory that a training run is going to take; loads the tasks, not the weights."""
    check_names(config.world)
    tasks = load_tasks(config.world, config.tasks, config.num_tasks, config.seed)
    episodes = config.group_size * config.groups_per_step
    turns = config.world.max_turns or EnvRegistry.spec(known_env(config.world.env)).max_steps or 1
    parameters = count_parameters(config.model)
    copy = 2 if config.engine.dtype == "bfloat16" else 4
    trained = parameters * (0.02 if config.optimizer.lora_rank else 1.0)
    return {
        "tasks": len(tasks),
        "held_out": {name: len(found) for name, found in _held_out(config).items()},
        "episodes_per_step": episodes,
        "episodes": episodes * config.steps,
        "sampled_tokens_at_most": episodes * config.steps * turns * config.sampling.max_tokens,
        "parameters": parameters,
        # float32 weights and the engine's copy, gradients and two moments of what trains
        "memory_bytes": round((4 + copy) * parameters + 12 * trained),
    }


def _slug(name: str) -> str:
    """The store's split of a held-out task set: `eval_` and the file's stem or the split's name."""
    return "eval_" + re.sub(r"[^a-z0-9]+", "_", Path(name).stem.lower())


def _held_out(config: TrainingConfig) -> dict[str, TaskSet]:
    held_out = config.held_out
    return {
        name: load_tasks(config.world, name, held_out.num_tasks, held_out.seed) for name in held_out.tasks
    }


async def _restore(session: Session) -> None:
    found = session.checkpoints.resumed()
    session.learner.load(found.learner)
    session.step = int(found.state["step"])
    session.position = int(found.state["position"])
    session.train_s = float(found.state["train_s"])
    await session.engine.load_weights(Weights(session.learner.version, session.learner.model.module))
    left = session.config.steps - session.step
    session.live.note(f"resumed at step {session.step}" if left > 0 else "already complete: no step is left")
