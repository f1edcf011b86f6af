"""What the recipes share of the world half: its settings, tasks by name or file, and an episode runner.

In: names and paths from a config. Out: objects of the rooms. No control flow of training lives here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from uni_agent.api import make_runner, resolve_reward, resolve_tool
from uni_agent.envs import EnvRegistry, TaskSet
from uni_agent.errors import UsageError
from uni_agent.recipes.sections import WorldConfig
from uni_agent.rollout import EpisodeRunner, MakePolicy
from uni_agent.sandbox import local_sandbox


def known_env(env: str) -> str:
    """Register `module:Class` under its own spelling; return the name. Raises UnknownNameError."""
    if ":" in env and env not in EnvRegistry.names():
        EnvRegistry.register(name=env, entry_point=env.replace(":", "."))
    EnvRegistry.spec(env)
    return env


def check_names(world: WorldConfig) -> None:
    """Look up environment, tools and reward, so that a misspelt one is known before anything is made.

    Raises UnknownNameError, UsageError.
    """
    known_env(world.env)
    for name in world.tools:
        resolve_tool(name)
    if world.reward:
        resolve_reward(world.reward)


def load_tasks(world: WorldConfig, tasks: str, num_tasks: int, seed: int) -> TaskSet:
    """Tasks from a JSONL or Parquet file, or from a split of the environment's own task set.

    `num_tasks` 0 takes the whole file. Raises TaskFileError, UsageError.
    """
    env = known_env(world.env)
    if tasks.endswith((".jsonl", ".ndjson", ".json", ".parquet")):
        return EnvRegistry.load_tasks(env, Path(tasks), limit=num_tasks or None)
    if num_tasks < 1:
        raise UsageError(f"num_tasks is {num_tasks}; generated tasks (split {tasks!r}) need at least 1")
    return EnvRegistry.source(env).tasks(tasks, num_tasks, seed)


@asynccontextmanager
async def open_runner(world: WorldConfig, make_policy: MakePolicy) -> AsyncGenerator[EpisodeRunner]:
    """Resolve the names of `world` and give the runner; the sandboxes close with the context."""
    async with local_sandbox() as sandbox:
        yield make_runner(
            env=known_env(world.env),
            tools=[resolve_tool(name) for name in world.tools],
            reward=resolve_reward(world.reward) if world.reward else None,
            make_policy=make_policy,
            sandbox=sandbox,
            system_prompt=world.system_prompt or None,
            max_turns=world.max_turns or None,
            timeout_s=world.timeout_s,
        )
