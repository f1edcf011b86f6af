"""Run episodes with a model folder or a chat endpoint and keep them; nothing is trained.

uni-agent run --model FOLDER --tasks tasks.jsonl --num-episodes 1000
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from uni_agent.recipes import evaluate
from uni_agent.recipes.interrupt import run_blocking
from uni_agent.recipes.measure import running_mean
from uni_agent.recipes.sections import CountOrOff
from uni_agent.recipes.world import check_names, load_tasks, open_runner
from uni_agent.rollout import EpisodeStore, rollout_metrics, run_many
from uni_agent.track import LiveConsole, Run


class Config(evaluate.Config):
    """Run episodes; settings as for `evaluate`."""

    tasks: str = "train"
    """A .jsonl or .parquet file, or a split of the environment's own task set."""
    num_episodes: CountOrOff = 0
    """In all, spread evenly over the tasks; 0 runs `num_attempts` per task."""


def plan(config: Config) -> Mapping[str, object]:
    """What `run` is going to do."""
    check_names(config.world)
    tasks = load_tasks(config.world, config.tasks, config.num_tasks, config.seed)
    return {"tasks": len(tasks), "episodes": config.num_episodes or len(tasks) * config.num_attempts}


def run(config: Config) -> Mapping[str, object]:
    """Run; the episodes are in the run directory, under the split "rollout"."""
    return run_blocking(_run(config))


async def _run(config: Config) -> Mapping[str, object]:
    began = time.perf_counter()
    check_names(config.world)
    tasks = list(load_tasks(config.world, config.tasks, config.num_tasks, config.seed))
    total = config.num_episodes or len(tasks) * config.num_attempts
    with (
        Run.create("rollout", config, root=Path(config.runs), name=config.run or None) as record,
        LiveConsole(every_s=5.0) as live,
    ):
        live.phase(f"{total} episodes of {config.model} on {len(tasks)} tasks", total)
        async with (
            evaluate.open_policy(config) as make_policy,
            open_runner(config.world, make_policy) as runner,
        ):
            episodes = await run_many(
                runner.run,
                tasks,
                num_episodes=total,
                concurrency=config.world.concurrency,
                seed=config.seed,
                progress=running_mean(live),
            )
        EpisodeStore(record.path).write(0, episodes, split="rollout")
        metrics = rollout_metrics(episodes)
        record.log(0, metrics)
        seconds = time.perf_counter() - began
        summary: dict[str, object] = {**metrics, "seconds": seconds, "run": str(record.path)}
        record.write_summary(summary)
        live.note(f"{len(episodes)} episodes in {seconds:.1f} s; next: uni-agent show {record.path}")
    return summary
