"""1,000 episodes in flight with a scripted engine of 200 ms a call, 5 turns: ours and a bare asyncio loop.

    python bench/rollout.py            about 1 minute on two quiet cores
    python bench/rollout.py --quick    tiny: shows that every arm works
    python bench/rollout.py --profile  where our time goes

An episode asks a calculator four times and then answers. "bare loop" is the same work without us: a
coroutine per episode that renders the prompt with the same renderer, awaits the same engine, parses the
answer, calls the same function, extends the tokens, and at the end compares the answer and keeps the
token ids. What it does not do is what we are for: typed episodes with masks, logprobs and versions per
token, schemas checked, failures typed and contained, time-outs, seeds, rewards, turns and their times.
"sleeping only" is five sleeps of 200 ms an episode, the most that the latency allows here.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from harness import BENCH, interleave, open_report, parse, parser

from uni_agent.agents import ToolLoopAgent
from uni_agent.envs.calculator import CalculatorEnv
from uni_agent.protocols import Renderer
from uni_agent.render import load_renderer
from uni_agent.rollout import EpisodeRunner, ScribeFactory, run_many
from uni_agent.sandbox import local_sandbox
from uni_agent.testing import Scripted, ScriptedEngine
from uni_agent.tools import tool
from uni_agent.types import Completion, Message, Sampling, Task

MODEL = BENCH.parent / "examples" / "code_repair" / "base"
NUM_TURNS = 5
LATENCY_S = 0.2
PAIRS = [("ours", "bare loop"), ("ours", "sleeping only")]


@tool
async def calculator(left: int, operation: str, right: int) -> str:
    """Compute one operation.

    Args:
        left: the first number
        operation: one of + - *
        right: the second number
    """
    return str(left * right if operation == "*" else left + right if operation == "+" else left - right)


def scripted(renderer: Renderer, tokenizer: Any) -> ScriptedEngine:
    """An engine that calls the calculator in the first four turns of a session and then answers."""
    body = '{"name": "calculator", "arguments": {"left": 12, "operation": "*", "right": 34}}'
    call = f"<tool_call>\n{body}\n</tool_call>"
    texts = [call] * (NUM_TURNS - 1) + ["The answer is 408."]
    stop = renderer.stop_token_ids[0]
    turns = [Scripted([*tokenizer.encode(text, add_special_tokens=False), stop]) for text in texts]
    made: dict[str, int] = {}

    def answer(prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Scripted:
        turn = made.get(session, 0)
        made[session] = turn + 1
        return turns[turn]

    return ScriptedEngine(answer, context_size=1 << 16, latency_s=LATENCY_S)


class Rollout:
    """The three arms. Each call plays `num_episodes`, and gives episodes per second."""

    def __init__(self, num_episodes: int, in_flight: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        self.renderer = load_renderer(MODEL)
        self.num_episodes, self.in_flight = num_episodes, in_flight
        self.tasks = list(CalculatorEnv.tasks("bench", num_episodes))

    def ours(self, _: int) -> float:
        return self._timed(self._ours())

    def bare(self, _: int) -> float:
        return self._timed(self._flood(self._bare))

    def sleeping(self, _: int) -> float:
        return self._timed(self._flood(self._sleeping))

    def _timed(self, work: Coroutine[Any, Any, None]) -> float:
        began = time.perf_counter()
        asyncio.run(work)
        return self.num_episodes / (time.perf_counter() - began)

    async def _ours(self) -> None:
        engine = scripted(self.renderer, self.tokenizer)
        async with local_sandbox() as sandbox:  # no tool here opens one
            runner = EpisodeRunner(
                agent=ToolLoopAgent([calculator], sandbox),
                make_env=CalculatorEnv,
                make_policy=ScribeFactory(engine, self.renderer, Sampling(max_tokens=128)),
            )
            episodes = await run_many(
                runner.run, self.tasks, num_episodes=self.num_episodes, concurrency=self.in_flight
            )
        wrong = [e for e in episodes if e.end != "done" or e.num_turns != NUM_TURNS or e.reward is None]
        if wrong or len(episodes) != self.num_episodes:
            raise SystemExit(
                f"{len(wrong)} episodes went wrong; the first ended {wrong[0].end}: {wrong[0].error}"
            )

    async def _flood(self, play: Callable[[ScriptedEngine, Task], Coroutine[Any, Any, object]]) -> None:
        """Play all tasks, so many at once."""
        engine = scripted(self.renderer, self.tokenizer)
        tasks = iter(self.tasks)
        kept: list[object] = []

        async def work() -> None:
            for task in tasks:
                kept.append(await play(engine, task))

        await asyncio.gather(*(work() for _ in range(self.in_flight)))

    async def _bare(self, engine: ScriptedEngine, task: Task) -> tuple[list[int], float]:
        tools = (calculator.spec,)
        ids = self.renderer.render(task.prompt, tools)
        sampling = Sampling(max_tokens=128)
        while True:
            new: list[int] = []
            async for part in engine.generate(ids, sampling, task.id):
                if isinstance(part, Completion):
                    new = part.token_ids.tolist()
            message = self.renderer.parse(new, tools)
            if not message.tool_calls:
                return ids + new, float(message.content.endswith(f"{task.data['value']}."))
            results = [Message("tool", await calculator(**call.arguments)) for call in message.tool_calls]
            added = self.renderer.extend(ids, new, results, tools)
            assert added is not None
            ids = ids + new + added

    async def _sleeping(self, engine: ScriptedEngine, task: Task) -> None:
        for _ in range(NUM_TURNS):
            await asyncio.sleep(LATENCY_S)


def profile(rollout: Rollout) -> None:
    """Print the functions that our arm spends its time in."""
    with cProfile.Profile() as watched:
        rollout.ours(0)
    pstats.Stats(watched).sort_stats("tottime").print_stats(30)


def main() -> None:
    made = parser("rollout", __doc__ or "")
    made.add_argument("--episodes", type=int, default=3000)
    made.add_argument("--in-flight", type=int, default=1000)
    made.add_argument("--profile", action="store_true", help="profile our arm instead")
    args: argparse.Namespace = parse(made, episodes=60, in_flight=20)
    rollout = Rollout(args.episodes, args.in_flight)
    if args.profile:
        profile(rollout)
        return
    report = open_report("rollout", args)
    arms = {"ours": rollout.ours, "bare loop": rollout.bare, "sleeping only": rollout.sleeping}
    case = f"{args.in_flight} in flight, {NUM_TURNS} turns"
    report.add(case, "episodes/s", interleave(arms, args.repeats), PAIRS)
    report.finish()


if __name__ == "__main__":
    main()
