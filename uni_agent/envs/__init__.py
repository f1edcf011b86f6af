"""Worlds and their tasks: the registry, task sets, and the environments that ship."""

from uni_agent.envs.calculator import CalculatorEnv
from uni_agent.envs.code_debug import CodeDebugEnv
from uni_agent.envs.registry import EnvRegistry, EnvSpec
from uni_agent.envs.tasks import TaskSet, TaskSource, load_tasks

__all__ = ["CalculatorEnv", "CodeDebugEnv", "EnvRegistry", "EnvSpec", "TaskSet", "TaskSource", "load_tasks"]
