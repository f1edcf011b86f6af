"""Measure a policy: n attempts per task, success with intervals, pass@k. Nothing is trained.

uni-agent eval --model FOLDER --tasks tasks.jsonl --num-attempts 4
uni-agent eval --endpoint http://127.0.0.1:8000/v1 --model NAME --tasks tasks.jsonl
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import model_validator

from uni_agent.config import BaseConfig
from uni_agent.engines.http import HttpPolicyFactory
from uni_agent.models import HFAutoModel
from uni_agent.recipes.engine import make_engine
from uni_agent.recipes.measure import attempt, report, require_scored, running_mean, summarise
from uni_agent.recipes.sections import (
    Count,
    CountOrOff,
    EngineConfig,
    Finite,
    SamplingConfig,
    WorldConfig,
)
from uni_agent.recipes.world import check_names, load_tasks, open_runner
from uni_agent.render import load_renderer
from uni_agent.rollout import (
    EpisodeStore,
    MakePolicy,
    ScribeFactory,
    rollout_metrics,
)
from uni_agent.track import LiveConsole, Run


class Config(BaseConfig):
    """Evaluate a model folder or a chat endpoint on a task set."""

    model: str
    """A model folder, or a name from `uni-agent model list`; with `endpoint`, the model's name there."""
    endpoint: str = ""
    """Base URL of an OpenAI-compatible chat endpoint; "" runs `model` in this process."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key."""
    renderer: str = ""
    """Chat format; "" reads it from the model folder."""
    world: WorldConfig = WorldConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    tasks: str = "test"
    """A .jsonl or .parquet file, or a split of the environment's own task set."""
    num_tasks: CountOrOff = 200
    """How many; 0 takes a whole file."""
    num_attempts: Count = 1
    """Episodes per task."""
    pass_at: tuple[Count, ...] = (1,)
    """The k of pass@k; each at most num_attempts."""
    success_at: Finite = 1.0
    """An episode is a success from this reward on."""
    seed: int = 0
    run: str = ""
    """Name of the run directory; "" derives one."""
    runs: str = "runs"
    """Where run directories are made."""

    @model_validator(mode="after")
    def _enough_attempts(self) -> Config:
        if max(self.pass_at, default=1) > self.num_attempts:
            raise ValueError(
                f"pass_at asks for pass@{max(self.pass_at)} with num_attempts {self.num_attempts}; "
                "no unbiased estimate exists for more than there are"
            )
        return self


@asynccontextmanager
async def open_policy(config: Config) -> AsyncGenerator[MakePolicy]:
    """The model in this process, or the endpoint."""
    sampling = config.sampling.to_sampling()
    if config.endpoint:
        key = os.environ.get(config.api_key_env, "")
        async with HttpPolicyFactory(
            config.endpoint, model=config.model, api_key=key, sampling=sampling
        ) as factory:
            yield factory
        return
    model = HFAutoModel.from_pretrained(config.model)
    renderer = load_renderer(config.model, name=config.renderer or None)
    engine = make_engine(
        config.engine, model, renderer, max_running=config.world.concurrency, seed=config.seed
    )
    try:
        yield ScribeFactory(engine, renderer, sampling)
    finally:
        await engine.close()


def plan(config: Config) -> Mapping[str, object]:
    """What `run` is going to do."""
    check_names(config.world)
    tasks = load_tasks(config.world, config.tasks, config.num_tasks, config.seed)
    return {"tasks": len(tasks), "episodes": len(tasks) * config.num_attempts}


def run(config: Config) -> Mapping[str, object]:
    """Evaluate; episodes go to the run directory, figures to its summary."""
    return asyncio.run(_run(config))


async def _run(config: Config) -> Mapping[str, object]:
    began = time.perf_counter()
    check_names(config.world)
    tasks = load_tasks(config.world, config.tasks, config.num_tasks, config.seed)
    with (
        Run.create("evaluate", config, root=Path(config.runs), name=config.run or None) as record,
        LiveConsole(every_s=5.0) as live,
    ):
        live.phase(f"Evaluating {config.model} on {len(tasks)} tasks", len(tasks) * config.num_attempts)
        async with open_policy(config) as make_policy, open_runner(config.world, make_policy) as runner:
            episodes = await attempt(
                runner,
                tasks,
                num_attempts=config.num_attempts,
                concurrency=config.world.concurrency,
                seed=config.seed,
                progress=running_mean(live),
            )
        EpisodeStore(record.path).write(0, episodes, split="eval")
        found = report(episodes, success_at=config.success_at, ks=config.pass_at)
        record.log(0, rollout_metrics(episodes))
        figures = summarise(found)
        live.table([{"figure": name, "value": value} for name, value in figures.items()])
        live.note(f"look at an episode: uni-agent show {record.path}")
        summary = {**figures, "seconds": time.perf_counter() - began, "run": str(record.path)}
        record.write_summary(summary)
        require_scored(episodes)
    return summary
