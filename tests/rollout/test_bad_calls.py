"""Bad tool calls from sampled tokens to the record: answered, counted, and never the end of an episode."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from uni_agent.agents import ToolLoopAgent
from uni_agent.protocols import RewardContext
from uni_agent.rollout import EpisodeRunner, ScribeFactory
from uni_agent.sandbox import local_sandbox
from uni_agent.testing import EchoEnvironment, Scripted, ScriptedEngine, ToyRenderer
from uni_agent.tools import tool
from uni_agent.types import Episode, Message, Sampling, Task

RENDERER = ToyRenderer()
RAN: list[tuple[int, int]] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    RAN.append((a, b))
    return a + b


def say(text: str) -> list[int]:
    return [*RENDERER.tokenizer.encode(text), 2]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(*turns: list[int]) -> tuple[Episode, ScriptedEngine]:
    RAN.clear()
    engine = ScriptedEngine([Scripted(ids) for ids in turns])
    sandbox = local_sandbox()
    runner = EpisodeRunner(
        agent=ToolLoopAgent([add], sandbox, max_turns=len(turns)),
        make_env=EchoEnvironment,
        make_policy=ScribeFactory(engine, RENDERER, Sampling(max_tokens=400)),
        reward=None,
        reward_context=RewardContext(sandbox),
        timeout_s=20,
    )
    task = Task("t", (Message("user", "q"),), {"secret": "hello"})
    return asyncio.run(runner.run(task, episode_id="t/0", seed=0)), engine


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1, "b": 2}',
        "{name: add}",
        '{"name": "add", "arguments": {"a": "say "hi"", "b": 2}}',
    ],
)
def test_p02_a_malformed_call_is_one_answer_and_the_next_call_runs(body: str) -> None:
    bad = say(f"<tool_call>{body}</tool_call>")
    episode, engine = play(bad, say(call("add", a=1, b=2)), say("hello"))
    assert episode.end == "done"
    (tape,) = episode.trajectories
    first, second, _ = tape.turns
    assert [result.error_kind for result in first.tool_results] == ["malformed"]
    assert "does not parse" in first.tool_results[0].content
    assert [result.content for result in second.tool_results] == ["3"]
    assert RAN == [(1, 2)]
    assert tape.token_ids[first.sampled[0] : first.sampled[1]].tolist() == bad
    assert engine.prompts[1][: len(engine.prompts[0]) + len(bad)] == [*engine.prompts[0], *bad]
    assert episode.metrics["rollout/malformed_calls"] == 1
    assert episode.metrics["rollout/tool_errors"] == 1


def test_p04_four_wrong_calls_are_four_answers_and_the_loop_goes_on() -> None:
    wrong = [call("sub", a=1, b=2), call("add", a="1", b=2), call("add", a=1), call("add", a=1, b=2, c=3)]
    episode, _ = play(*map(say, wrong), say("hello"))
    assert episode.end == "done"
    turns = episode.trajectories[0].turns
    results = [result for turn in turns for result in turn.tool_results]
    assert len(results) == 4
    for result, named in zip(results, ("sub", "a: ", "b: ", "c: "), strict=True):
        assert named in result.content
    assert RAN == []
    assert episode.metrics["rollout/tool_errors"] == 4
    assert episode.metrics["rollout/malformed_calls"] == 0
