"""Control flow in messages: who plays the episodes."""

from uni_agent.agents.tool_loop import ToolLoopAgent

__all__ = ["ToolLoopAgent"]
