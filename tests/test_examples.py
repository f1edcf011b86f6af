"""What the README shows, run: the article's example, and a world of one's own."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from uni_agent.api import make_runner, resolve_reward, resolve_tool
from uni_agent.envs import EnvRegistry
from uni_agent.rollout import ScribeFactory, run_many
from uni_agent.sandbox import local_sandbox
from uni_agent.testing import Scripted, ScriptedEngine, ToyRenderer
from uni_agent.types import Sampling

ROOT = Path(__file__).parents[1]


def test_the_article_runs_as_written() -> None:
    done = subprocess.run(
        [sys.executable, "examples/article.py", "32"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "32 episodes" in done.stdout
    assert "the next rollout was sampled by version 1" in done.stdout


def test_own_world_is_played_and_scored(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/own_world"))
    EnvRegistry.register(name="shop", entry_point="shop.ShopEnv", max_steps=4)
    tasks = EnvRegistry.load_tasks("shop", ROOT / "examples/own_world/tasks.jsonl")
    renderer = ToyRenderer()

    def say(text: str) -> Scripted:
        return Scripted([*renderer.tokenizer.encode(text), 2])

    def call(item: str) -> Scripted:
        body = json.dumps({"name": "price", "arguments": {"item": item}})
        return say(f"<tool_call>{body}</tool_call>")

    engine = ScriptedEngine([call("apple"), call("pear"), say("8"), say("5")])
    runner = make_runner(
        env="shop",
        tools=[resolve_tool("shop:price")],
        reward=resolve_reward("shop:frugal"),
        make_policy=ScribeFactory(engine, renderer, Sampling(max_tokens=200)),
        sandbox=local_sandbox(),
    )
    chosen = [tasks["one"], tasks["two"]]
    episodes = asyncio.run(run_many(runner.run, chosen, num_episodes=2, concurrency=1))
    assert [e.end for e in episodes] == ["done", "done"]
    assert [round(e.reward or 0.0, 2) for e in episodes] == [0.85, -0.05]
    told = [result.content for turn in episodes[0].trajectories[0].turns for result in turn.tool_results]
    assert told == ["3", "5"]
