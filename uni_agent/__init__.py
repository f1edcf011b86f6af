"""uni_agent: build an LLM agent, run it thousands of times at once, train it from its own episodes.

The public names are imported when they are first used; importing the package does nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uni_agent.api import AgentPolicy, AgentRuntime, GRPOTrainer, PPOTrainer, RewardModel
    from uni_agent.envs import EnvRegistry
    from uni_agent.models import HFAutoModel, LoRA
    from uni_agent.tools import tool
    from uni_agent.types import Episode, Message, Sampling, Task

_PLACES = {
    "AgentPolicy": "api",
    "AgentRuntime": "api",
    "EnvRegistry": "envs",
    "Episode": "types",
    "GRPOTrainer": "api",
    "HFAutoModel": "models",
    "LoRA": "models",
    "Message": "types",
    "PPOTrainer": "api",
    "RewardModel": "api",
    "Sampling": "types",
    "Task": "types",
    "tool": "tools",
}

__all__ = [
    "AgentPolicy",
    "AgentRuntime",
    "EnvRegistry",
    "Episode",
    "GRPOTrainer",
    "HFAutoModel",
    "LoRA",
    "Message",
    "PPOTrainer",
    "RewardModel",
    "Sampling",
    "Task",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'uni_agent' has no attribute {name!r}")
    return getattr(importlib.import_module(f"uni_agent.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
