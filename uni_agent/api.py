"""The article's objects: a policy, a runtime, a reward, a trainer. Each is a few lines over the rooms.

Names that users write as strings resolve here, in the literal tables TOOLS and REWARDS; anything else
is `module:attribute`. Engine, sandboxes and event loop live in one background thread that a policy
owns, so that plain `asyncio.run(...)` calls, one after the other, work.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from uni_agent.agents import ToolLoopAgent
from uni_agent.algos.advantages import gae, grpo, kl_in_reward
from uni_agent.algos.losses import policy_clip
from uni_agent.engines.local import LocalEngine
from uni_agent.envs import EnvRegistry
from uni_agent.errors import UnknownNameError, UsageError
from uni_agent.models import HFAutoModel, LoRA
from uni_agent.protocols import Environment, Reward, SandboxFactory, Tool
from uni_agent.render import load_renderer
from uni_agent.rewards import code_test_pass_rate, reward_from_function
from uni_agent.rollout import EpisodeRunner, run_many
from uni_agent.sandbox import local_sandbox
from uni_agent.tools import CodeExecutor, tool
from uni_agent.types import Episode, Group, Sampling, Task

T = TypeVar("T")

TOOLS: dict[str, Callable[[], Tool]] = {"code_executor": CodeExecutor}
REWARDS: dict[str, Reward] = {"code_test_pass_rate": code_test_pass_rate}


def import_attribute(reference: str) -> Any:
    """Import `module:attribute`. Raises UsageError in one line when that fails."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {reference!r}: {error}; expected module:attribute") from error


def resolve_tool(item: str | Callable[..., Any] | Tool) -> Tool:
    """A tool from its shipped name, `module:attribute`, a typed function, or a tool as it is."""
    if isinstance(item, str):
        if item in TOOLS:
            return TOOLS[item]()
        if ":" not in item:
            raise UnknownNameError("tool", item, TOOLS)
        return resolve_tool(import_attribute(item))
    if inspect.isfunction(item):
        return tool(item)
    return item() if inspect.isclass(item) else item


def resolve_reward(item: str | Callable[..., Any]) -> Reward:
    """A reward from its shipped name, `module:attribute`, or a function of an episode."""
    if isinstance(item, str):
        if item in REWARDS:
            return REWARDS[item]
        if ":" not in item:
            raise UnknownNameError("reward", item, REWARDS)
        return resolve_reward(import_attribute(item))
    if item in REWARDS.values() or len(inspect.signature(item).parameters) > 1:
        return item
    return reward_from_function(item, getattr(item, "__name__", type(item).__name__))
