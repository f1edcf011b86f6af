"""The article's objects: a policy, a runtime, a reward, a trainer. Each is a few lines over the rooms.

Names that users write as strings resolve here, in the literal tables TOOLS and REWARDS; anything else
is `module:attribute`. Engine, sandboxes and event loop live in one background thread that the policy
owns, so that plain `asyncio.run(...)` calls, one after the other, work.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from uni_agent.agents import ToolLoopAgent
from uni_agent.algos.advantages import gae, grpo
from uni_agent.algos.checks import check_kl
from uni_agent.algos.losses import combine, policy_clip, value_clip
from uni_agent.engines.local import LocalEngine
from uni_agent.envs import EnvRegistry
from uni_agent.envs.calculator import calculator
from uni_agent.errors import UnknownNameError, UsageError
from uni_agent.models import HFAutoModel, LoRA
from uni_agent.protocols import Advantage, Loss, Reward, RewardContext, SandboxFactory, Tool
from uni_agent.render import load_renderer
from uni_agent.rewards import code_test_pass_rate, code_test_progress, reward_from_function
from uni_agent.rollout import EpisodeRunner, MakePolicy, ScribeFactory, rollout_metrics, run_many
from uni_agent.rollout.scoring import end_of_failure, score
from uni_agent.sandbox import local_sandbox
from uni_agent.tools import CodeExecutor, tool
from uni_agent.train.batch import items, make_batch, minibatches
from uni_agent.train.critic import TrunkCritic
from uni_agent.train.learner import LearnerConfig, TorchLearner
from uni_agent.train.optim import OptimConfig
from uni_agent.types import TRAINING_POLICY, Episode, Group, Sampling, Task, derive_seed

T = TypeVar("T")

TOOLS: dict[str, Callable[[], Tool]] = {
    "code_executor": CodeExecutor,
    "calculator": partial(tool, calculator),
}
REWARDS: dict[str, Reward] = {
    "code_test_pass_rate": code_test_pass_rate,
    "code_test_progress": code_test_progress,
}


def import_attribute(reference: str) -> Any:
    """Import `module:attribute`. Raises UsageError in one line when that fails."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's, and may raise anything while it is imported
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"cannot import {reference!r}: {reason}; expected module:attribute") from error


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
    try:
        made: object = item() if inspect.isclass(item) else item
    except Exception as error:  # the class is the user's, and may raise anything
        reason = " ".join(str(error).split())
        raise UsageError(f"{item!r} cannot be made without arguments: {reason}") from error
    if not isinstance(made, Tool):
        raise UsageError(
            f"{made!r} is no tool; expected a typed function, or an object with spec, timeout_s and call"
        )
    return made


def resolve_reward(item: str | Callable[..., Any]) -> Reward:
    """A reward from its shipped name, `module:attribute`, or a function of an episode."""
    if isinstance(item, str):
        if item in REWARDS:
            return REWARDS[item]
        if ":" not in item:
            raise UnknownNameError("reward", item, REWARDS)
        return resolve_reward(import_attribute(item))
    if not callable(item):
        raise UsageError(f"{item!r} is no reward; expected a function of an episode")
    if item in REWARDS.values() or len(inspect.signature(item).parameters) > 1:
        return item
    return reward_from_function(item, getattr(item, "__name__", type(item).__name__))


def make_runner(
    *,
    env: str,
    tools: Sequence[Tool],
    reward: Reward | None,
    make_policy: MakePolicy,
    sandbox: SandboxFactory,
    system_prompt: str | None = None,
    max_turns: int | None = None,
    timeout_s: float = 300.0,
) -> EpisodeRunner:
    """The runner of a tool-loop agent in a registered environment."""
    limit = max_turns or EnvRegistry.spec(env).max_steps
    return EpisodeRunner(
        agent=ToolLoopAgent(tools, sandbox, system_prompt=system_prompt, max_turns=limit),
        make_env=partial(EnvRegistry.make, env),
        make_policy=make_policy,
        reward=reward,
        reward_context=RewardContext(sandbox),
        timeout_s=timeout_s,
    )


class _Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="uni-agent", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run in the background; await the result from any other loop. Cancelling reaches the work."""
        return asyncio.wrap_future(self._submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the background and block for the result."""
        return self._submit(work).result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self.loop.is_closed():
            work.close()
            raise UsageError("the policy is closed; make a new AgentPolicy")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()


class AgentPolicy:
    """A causal LM with tools bound to it. Training updates it in place; each `train` raises `version`.

    `model_path` is a folder that transformers loads, with `renderer.json` naming its chat format (or
    `renderer` given here). `tools` are shipped names, typed functions or Tool objects. `sampling` is
    how rollouts draw tokens. Raises ModelError, UnknownNameError.
    """

    def __init__(
        self,
        model_path: str | Path,
        tools: Sequence[str | Callable[..., Any] | Tool] = (),
        *,
        system_prompt: str | None = None,
        sampling: Sampling | None = None,
        renderer: str | None = None,
        lora: LoRA | None = None,
        max_running: int = 64,
    ) -> None:
        self.tools = tuple(resolve_tool(item) for item in tools)
        self.model = HFAutoModel.from_pretrained(model_path, lora=lora)
        self.renderer = load_renderer(model_path, name=renderer)
        self.system_prompt = system_prompt
        self.sampling = sampling or Sampling()
        self.engine = LocalEngine(
            self.model.module,
            context_size=self.model.context_size,
            max_running=max_running,
            decode=self.renderer.decode,
        )
        self.background = _Background()
        self.sandbox = local_sandbox()
        self._closed = False
        atexit.register(self.close)

    @property
    def version(self) -> int:
        """How many times the weights were published; rollouts sample with this version."""
        return self.engine.version

    def save(self, folder: str | Path) -> None:
        """Write safetensors, config and tokenizer, as transformers loads them."""
        self.model.save(Path(folder))

    def close(self) -> None:
        """End the engine, the sandboxes and the background loop. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)

        async def end() -> None:
            await self.engine.close()
            await self.sandbox.close()

        self.background.wait(end())
        self.background.stop()


class AgentRuntime:
    """Runs a policy's episodes in a registered environment. Raises UnknownNameError."""

    def __init__(
        self,
        policy: AgentPolicy,
        env_name: str,
        *,
        concurrency: int = 256,
        timeout_s: float = 300.0,
        seed: int = 0,
    ) -> None:
        EnvRegistry.spec(env_name)
        self.policy = policy
        self.env_name = env_name
        self._concurrency = concurrency
        self._seed = seed
        self._num_rollouts = 0
        self._runner = make_runner(
            env=env_name,
            tools=policy.tools,
            reward=None,
            make_policy=ScribeFactory(policy.engine, policy.renderer, policy.sampling),
            sandbox=policy.sandbox,
            system_prompt=policy.system_prompt,
            timeout_s=timeout_s,
        )

    async def batch_rollout(
        self,
        tasks: Sequence[str | Task],
        num_episodes: int | None = None,
        *,
        progress: Callable[[int, int, Episode], None] | None = None,
    ) -> list[Episode]:
        """Run `num_episodes` in all (None: one per task), spread evenly; returned task by task.

        Task ids resolve through the environment's task set. The episodes are complete: tokens,
        logprobs, versions, messages, tool results, step rewards, artifacts. `train` takes them as
        they are. A failed episode is among them, with its end reason.
        """
        known = EnvRegistry.resolve(self.env_name, tasks)
        step = self._num_rollouts
        self._num_rollouts += 1
        return await self.policy.background.start(
            run_many(
                self._runner.run,
                known,
                num_episodes=len(known) if num_episodes is None else num_episodes,
                concurrency=self._concurrency,
                seed=self._seed,
                step=step,
                progress=progress,
            )
        )


class RewardModel:
    """A reward by name (`code_test_pass_rate`), or any function of an episode that returns a number."""

    def __init__(self, reward_fn: str | Callable[..., Any]) -> None:
        self.reward = resolve_reward(reward_fn)

    async def score(self, episodes: Sequence[Episode], sandbox: SandboxFactory) -> list[Episode]:
        """Score episodes that ended without an error; one that cannot be scored keeps reward None."""
        context = RewardContext(sandbox)
        limit = asyncio.Semaphore(64)

        async def one(episode: Episode) -> Episode:
            if TRAINING_POLICY[episode.end] in ("drop", "retry") or episode.num_turns == 0:
                return episode
            async with limit:
                try:
                    return await score(episode, self.reward, context)
                except Exception as error:
                    reason = f"the reward raised {type(error).__name__}: {error}"
                    return replace(episode, end=end_of_failure(error), reward=None, reward_reason=reason)

        return list(await asyncio.gather(*map(one, episodes)))


class _Trainer:
    """Score, credit, minibatches, optimizer steps, push back: what the trainers below share."""

    _advantage: Advantage
    _loss: Loss

    def __init__(
        self, policy: AgentPolicy, reward_model: RewardModel, learner: TorchLearner, minibatch: int, seed: int
    ) -> None:
        self.policy = policy
        self.reward_model = reward_model
        self.learner = learner
        self._minibatch = minibatch
        self._seed = seed

    def train(self, trajectories: Sequence[Episode], epochs: int = 1) -> Mapping[str, float]:
        """Train on what `batch_rollout` returned, and return the metrics. The policy is updated."""
        if not trajectories:
            raise UsageError("train got no episodes; run batch_rollout first")
        policy = self.policy
        scored = policy.background.wait(self.reward_model.score(trajectories, policy.sandbox))
        groups = _by_task(scored)
        policy.background.wait(policy.engine.pause())
        try:
            flat = iter(self.learner.score([t for e in scored for t in e.trajectories]))
            by_episode = {e.id: [next(flat) for _ in e.trajectories] for e in scored}
            scores = [[by_episode[e.id] for e in group.episodes] for group in groups]
            trained = items(groups, self._advantage(groups, scores), scores)
            steps: list[Mapping[str, float]] = []
            for epoch in range(epochs):
                for part in minibatches(trained, self._minibatch, seed=derive_seed(self._seed, epoch)):
                    steps.append(self.learner.step(make_batch(part), self._loss))
            policy.background.wait(policy.engine.load_weights(self.learner.publish()))
        finally:
            policy.background.wait(policy.engine.resume())
        means = {key: sum(s.get(key, 0.0) for s in steps) / len(steps) for key in steps[-1]}
        return {**rollout_metrics(scored), **means, "train/updates": float(len(steps))}


class PPOTrainer(_Trainer):
    """PPO with a value head on the policy's trunk and the KL to the starting policy in the reward.

    `kl_ctrl` is that penalty's coefficient, per token and nat; 0 keeps no reference. `minibatch` is
    in trajectories. `discount` and `lam` apply per turn.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        reward_model: RewardModel,
        *,
        kl_ctrl: float = 0.0,
        lr: float = 1e-4,
        clip: float = 0.2,
        value_coef: float = 0.5,
        discount: float = 1.0,
        lam: float = 0.95,
        minibatch: int = 128,
        seed: int = 0,
    ) -> None:
        check_kl(kl_ctrl, in_reward=True, in_loss=False)
        learner = TorchLearner(
            policy.model,
            LearnerConfig(optim=OptimConfig(lr=lr, critic_lr=10 * lr)),
            reference=policy.model.fresh_reference() if kl_ctrl else None,
            critic=TrunkCritic(policy.model),
        )
        super().__init__(policy, reward_model, learner, minibatch, seed)
        self._advantage = partial(gae, discount=discount, lam=lam, kl_coef=kl_ctrl)
        self._loss = combine(
            (1.0, partial(policy_clip, clip_low=clip, clip_high=clip)),
            (value_coef, partial(value_clip, clip=None)),
        )


class GRPOTrainer(_Trainer):
    """GRPO: the episodes of one task are compared with each other. `kl_ctrl` is a loss term."""

    def __init__(
        self,
        policy: AgentPolicy,
        reward_model: RewardModel,
        *,
        kl_ctrl: float = 0.0,
        lr: float = 1e-4,
        clip: float = 0.2,
        minibatch: int = 128,
        seed: int = 0,
    ) -> None:
        check_kl(kl_ctrl, in_reward=False, in_loss=True)
        learner = TorchLearner(
            policy.model,
            LearnerConfig(optim=OptimConfig(lr=lr)),
            reference=policy.model.fresh_reference() if kl_ctrl else None,
        )
        super().__init__(policy, reward_model, learner, minibatch, seed)
        self._advantage = grpo
        self._loss = partial(policy_clip, clip_low=clip, clip_high=clip, kl_coef=kl_ctrl)


def _by_task(episodes: Sequence[Episode]) -> list[Group]:
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.task.id, []).append(episode)
    return [Group(task, tuple(members)) for task, members in groups.items()]
