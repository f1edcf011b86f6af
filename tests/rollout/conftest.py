"""A minimal agent, and a runner over the toy engine, for all tests of the room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from uni_agent.protocols import ChatRequest, Environment, Policy, Reward, Scores
from uni_agent.rollout import EpisodeRunner, ScribeFactory
from uni_agent.testing import EchoEnvironment, Scripted, ScriptedEngine, ToyRenderer
from uni_agent.types import EndReason, Message, Sampling, Task

ANSWER = Scripted([19, 2])  # "a", end


@dataclass(frozen=True, slots=True)
class TalkAgent:
    """Speaks, listens, and stops after `max_turns`. Calls no tools."""

    max_turns: int = 3

    async def run(self, task: Task, env: Environment, policy: Policy) -> EndReason:
        messages = await env.reset(task)
        for _ in range(self.max_turns):
            reply = await policy.chat(ChatRequest(messages))
            result = await env.step(reply.message, ())
            if result.terminated:
                return "done"
            messages = (*messages, reply.message, *result.messages)
        return "max_turns"


@pytest.fixture
def talk() -> type[TalkAgent]:
    return TalkAgent


@pytest.fixture
def task() -> Task:
    return Task("t", (Message("user", "q"),), {"secret": "b"})


def answers(prompt: Any, sampling: Any, session: str) -> Scripted:
    """An engine's script: always the same short answer."""
    return ANSWER


@pytest.fixture
def make_runner() -> Callable[..., EpisodeRunner]:
    def make(
        *,
        agent: Any = None,
        make_env: Callable[[], Environment] = EchoEnvironment,
        engine: ScriptedEngine | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        reward: Reward | None = None,
        timeout_s: float = 20.0,
        fail_fast: bool = False,
        on_cancelled: Any = None,
    ) -> EpisodeRunner:
        engine = engine or ScriptedEngine(answers)
        return EpisodeRunner(
            agent=agent or TalkAgent(),
            make_env=make_env,
            make_policy=ScribeFactory(engine, ToyRenderer(), sampling or Sampling(20), max_tokens),
            reward=reward,
            timeout_s=timeout_s,
            fail_fast=fail_fast,
            on_cancelled=on_cancelled,
        )

    return make


@pytest.fixture
def constant_reward() -> Callable[[float], Reward]:
    def make(value: float) -> Reward:
        async def reward(episode: Any, context: Any) -> Scores:
            return Scores({"constant": value})

        return reward

    return make
