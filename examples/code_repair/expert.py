"""Write down episodes of the scripted expert, as conversations for the `sft` recipe.

    python examples/code_repair/expert.py OUT.jsonl [--num 4000] [--seed 1]

The expert repairs functions with one bug: right at the first try, or right at the second after a mistake
that is context and is not learned (`weight` 0). What the tool answers to the mistake is what the real
tool answers in the real sandbox. Nobody scripted an expert for two or three bugs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from uni_agent.envs import CodeDebugEnv
from uni_agent.envs.repair_tasks import expert_episode, generate_tasks
from uni_agent.protocols import SandboxFactory, ToolContext
from uni_agent.render import tool_to_json
from uni_agent.sandbox import local_sandbox
from uni_agent.tools import CodeExecutor, Toolbox
from uni_agent.types import ToolCall

EXECUTOR = CodeExecutor()
TOOL = tool_to_json(EXECUTOR.spec)


async def conversation(row: dict[str, Any], seed: int, sandbox: SandboxFactory) -> dict[str, Any]:
    """Play one episode of the expert."""
    task = CodeDebugEnv.task_from_json(row)
    edits = expert_episode(row, seed)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt[0].content}]
    async with Toolbox((EXECUTOR,), ToolContext(task, sandbox(), seed)) as toolbox:
        for number, edit in enumerate(edits, 1):
            call = ToolCall("call_0", EXECUTOR.spec.name, {"line": edit.line, "code": edit.code})
            function = {"name": call.name, "arguments": dict(call.arguments)}
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": call.id, "type": "function", "function": function}],
                    "weight": int(number == len(edits)),
                }
            )
            if number < len(edits):
                (result,) = await toolbox.call_all([call])
                messages.append(
                    {"role": "tool", "content": result.content, "tool_call_id": call.id, "name": call.name}
                )
    return {"messages": messages, "tools": [TOOL]}


async def conversations(num: int, seed: int) -> list[dict[str, Any]]:
    """Play `num` episodes on freshly generated training tasks."""
    rows = generate_tasks(num, seed=seed, levels=(1,))
    limit = asyncio.Semaphore(16)

    async def one(row: dict[str, Any]) -> dict[str, Any]:
        async with limit:
            return await conversation(row, seed, sandbox)

    async with local_sandbox() as sandbox:
        return list(await asyncio.gather(*map(one, rows)))


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    episodes = asyncio.run(conversations(args.num, args.seed))
    args.out.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))


if __name__ == "__main__":
    main()
