"""The tool loop: ask the policy, run the calls it makes, tell the environment, until it is over.

Messages flow in and out; tokens, scores and training are elsewhere. The tools of an
episode share one sandbox, which starts when a tool first needs it and ends with the episode.
"""

from __future__ import annotations

from collections.abc import Sequence

from uni_agent.protocols import ChatRequest, Environment, Policy, SandboxFactory, Tool, ToolContext
from uni_agent.tools import Toolbox
from uni_agent.types import EndReason, Message, Task, ToolResult


class ToolLoopAgent:
    """Plays episodes with tools. One instance serves any number of episodes at once.

    `system_prompt` None sends no system message. `max_turns` None leaves the end to the environment
    and to the context; calls of one turn beyond `max_calls_per_turn` are answered, not run.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        sandbox: SandboxFactory,
        *,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        max_calls_per_turn: int = 4,
    ) -> None:
        self._tools = tuple(tools)
        self._sandbox = sandbox
        self._system = () if system_prompt is None else (Message("system", system_prompt),)
        self._max_turns = max_turns
        self._max_calls_per_turn = max_calls_per_turn

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        """Play one episode and say how it ended; what breaks is raised."""
        messages = [*self._system, *await env.reset(task)]
        context = ToolContext(task, self._sandbox(), policy.seed)
        async with Toolbox(self._tools, context, max_calls_per_turn=self._max_calls_per_turn) as toolbox:
            turn = 0
            while True:
                reply = await policy.chat(ChatRequest(tuple(messages), toolbox.specs))
                # A turn that was cut short is nobody's decision: it is neither judged nor punished.
                if reply.finish == "length":
                    return "max_tokens"
                if reply.finish == "cancelled":
                    return "cancelled"
                results = await toolbox.call_all(reply.message.tool_calls)
                step = await env.step(reply.message, results)
                turn += 1
                if step.terminated:
                    return "done"
                if step.truncated or turn == self._max_turns:
                    return "max_turns"
                news = [*map(_tool_message, results), *step.messages]
                if not news:
                    # An answer to which the world has nothing to say is the last one.
                    return "done"
                messages += [reply.message, *news]


def _tool_message(result: ToolResult) -> Message:
    return Message("tool", result.content, tool_call_id=result.call_id, name=result.name)
