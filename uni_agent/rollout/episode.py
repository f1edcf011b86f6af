"""One episode from task to Episode: the boundary where an error becomes data.

A task, an agent, a fresh environment and a fresh policy go in; an Episode comes out, whatever
happened, typed by its end reason. The agent does not know that it is recorded, and nothing here
knows which kind of agent, environment or reward it runs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from uni_agent.errors import (
    ContextFull,
    EngineError,
    EnvironmentFailure,
    RewardError,
    RunError,
    SandboxError,
    ToolError,
)
from uni_agent.protocols import Agent, Environment, Reward, RewardContext, Sandbox, StepResult
from uni_agent.rollout.scoring import end_of_failure, finite, score
from uni_agent.rollout.scribe import MakePolicy, RecordingPolicy, TokenBudgetSpent
from uni_agent.types import TRAINING_POLICY, EndReason, Episode, Message, Task, ToolResult, Turn

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
_BROKEN: tuple[EndReason, ...] = ("agent_error", "tool_error", "env_error", "sandbox_error", "engine_error")
UNSCORED_ENDS: frozenset[EndReason] = frozenset[EndReason]((*_BROKEN, "cancelled"))
"""Ends that are not the agent's doing: no reward is asked for."""
ERROR_ENDS: frozenset[EndReason] = frozenset[EndReason]((*_BROKEN, "reward_error"))
"""Ends that say that something broke."""
_FAILURES = (Exception, SystemExit)
"""What an agent, a world or a reward may raise; `sys.exit` in one of them must not end the run."""
_TYPED_ERRORS: tuple[tuple[type[BaseException], EndReason], ...] = (
    (TokenBudgetSpent, "max_tokens"),
    (ContextFull, "context_full"),
    (EngineError, "engine_error"),
    (SandboxError, "sandbox_error"),
    (ToolError, "tool_error"),
    (EnvironmentFailure, "env_error"),
)


def episode_id(step: int, task_id: str, index: int, attempt: int = 0) -> str:
    """Name the `index`-th episode of a task in a step; `attempt` counts its repetitions."""
    return f"{step}/{task_id}/{index}" + (f"+{attempt}" if attempt else "")


def _no_sandbox() -> Sandbox:
    raise RewardError("the reward asked for a sandbox and has none; pass reward_context to EpisodeRunner")


_NO_CONTEXT = RewardContext(sandbox=_no_sandbox)


class _World:
    """The environment as the agent sees it; keeps what its steps gave."""

    def __init__(self, env: Environment, policy: RecordingPolicy) -> None:
        self._env = env
        self._policy = policy
        self._closed = False
        self.resetting = False
        self.failure: BaseException | None = None
        self.artifacts: dict[str, bytes] = {}
        self.metrics: dict[str, float] = {}

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self.resetting = True
        try:
            messages = await self._env.reset(task)
        except _FAILURES as error:
            self.failure = error
            raise
        self.resetting = False
        return messages

    async def step(self, message: Message, tool_results: Sequence[ToolResult]) -> StepResult:
        try:
            result = await self._env.step(message, tool_results)
            reward = None if result.reward is None else finite(result.reward, "the step reward")
        except BaseException as error:
            self._policy.record(tool_results, None)
            if isinstance(error, _FAILURES):
                self.failure = error
            raise
        self._policy.record(tool_results, reward)
        if result.artifacts:
            self.artifacts.update(result.artifacts)
        if result.metrics:
            self.metrics.update(result.metrics)
        return result

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._env.close()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How the play ended; `error` is what ended it, where something did."""

    end: EndReason
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes; every call makes its own environment and policy and shares nothing mutable.

    Without `reward`, the reward is the sum of the environment's step rewards. `timeout_s` bounds the
    play, and the reward once more. `fail_fast` raises RunError for the first episode that ends in an
    error, or whose prompt does not fit, instead of recording it. `on_cancelled` is handed the record of
    an episode that was cancelled from outside, before the cancellation goes on.
    """

    agent: Agent
    make_env: Callable[[], Environment]
    make_policy: MakePolicy
    reward: Reward | None = None
    reward_context: RewardContext = _NO_CONTEXT
    timeout_s: float = 600.0
    fail_fast: bool = False
    on_cancelled: Callable[[Episode], None] | None = None

    async def run(self, task: Task, *, episode_id: str, seed: int) -> Episode:
        """Play, close the world, then score.

        The environment works on a copy of `task.data`, which the Episode keeps. An error becomes the
        Episode's end reason and text; only cancellation from outside is raised on.
        """
        began = time.perf_counter()
        task = replace(task, data=copy.deepcopy(task.data))
        policy = self.make_policy(episode_id, seed)
        world: _World | None = None
        close_errors = 0
        try:
            world = _World(self.make_env(), policy)
        except _FAILURES as error:
            outcome = _Outcome("env_error", error)
        else:
            outcome = await self._play(task, world, policy)
            close_errors += await _closed(world.close, "environment", episode_id)
        close_errors += await _closed(policy.close, "policy", episode_id)
        episode = Episode(
            id=episode_id,
            task=task,
            trajectories=policy.trajectories(),
            end=outcome.end,
            artifacts=world.artifacts if world else {},
            error=_error_text(outcome),
            seed=seed,
            trainable=policy.trainable,
        )
        metrics = _metrics(episode, time.perf_counter() - began, close_errors)
        episode = replace(episode, metrics={**metrics, **(world.metrics if world else {})})
        if outcome.end == "cancelled":
            return self._cancelled(episode, outcome.error)
        return await self._settle(episode, outcome)

    async def _play(self, task: Task, world: _World, policy: RecordingPolicy) -> _Outcome:
        clock = asyncio.timeout(self.timeout_s)
        try:
            async with clock:
                reason: str = await self.agent.run(task, world, policy)
        except asyncio.CancelledError as error:
            return _Outcome("cancelled", error)
        except _FAILURES as error:
            if not clock.expired():
                return _Outcome(_end_of(error, world), error)
        else:
            if world.failure is not None:
                return _Outcome(_end_of(world.failure, world), world.failure)
            if reason not in TRAINING_POLICY:
                known = ", ".join(TRAINING_POLICY)
                error = TypeError(f"the agent returned {reason!r} as its end; expected one of {known}")
                return _Outcome("agent_error", error)
            if not clock.expired():
                return _Outcome(reason)
        if world.resetting:
            error = EnvironmentFailure(f"the reset took longer than {self.timeout_s} s")
            return _Outcome("env_error", error)
        return _Outcome("timeout", TimeoutError(f"the episode took longer than {self.timeout_s} s"))

    def _cancelled(self, episode: Episode, error: BaseException | None) -> Episode:
        """Hand the record on; raise when the cancellation came from outside the episode."""
        task = asyncio.current_task()
        if error is None or task is None or task.cancelling() == 0:
            return replace(episode, reward_reason="not scored: the episode was cancelled")
        if self.on_cancelled is not None:
            self.on_cancelled(replace(episode, reward_reason="not scored: the episode was cancelled"))
        raise error

    async def _settle(self, episode: Episode, outcome: _Outcome) -> Episode:
        """Score an episode that can be scored, and say why the others cannot."""
        error = outcome.error
        if episode.end in UNSCORED_ENDS:
            episode = replace(episode, reward_reason=f"not scored: the episode ended {episode.end}")
        elif episode.num_turns == 0:
            episode = replace(episode, reward_reason="not scored: no model call was made")
        else:
            try:
                async with asyncio.timeout(self.timeout_s):
                    episode = await score(episode, self.reward, self.reward_context)
            except asyncio.CancelledError as cancelled:
                return self._cancelled(replace(episode, end="cancelled"), cancelled)
            except _FAILURES as raised:
                error = raised
                end = end_of_failure(raised)
                reason = f"the reward raised {_summary(raised)}"
                episode = replace(
                    episode, end=end, error=_error_text(_Outcome(end, raised)), reward_reason=reason
                )
        never_began = episode.end == "context_full" and episode.num_turns == 0
        if episode.end in ERROR_ENDS or never_began:
            first_line = (episode.error or "").partition("\n")[0]
            if self.fail_fast:
                raise RunError(f"episode {episode.id} ended {episode.end}: {first_line}") from error
            log.warning("episode %s ended %s: %s", episode.id, episode.end, first_line)
        return episode


def _end_of(error: BaseException, world: _World) -> EndReason:
    """What kind of failure it is: by the error's own type first, then by where it happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    for kind, end in _TYPED_ERRORS:
        if isinstance(error, kind):
            return end
    return "agent_error" if world.failure is None else "env_error"


async def _closed(close: Callable[[], Awaitable[None]], what: str, episode: str) -> int:
    """Close; a failure is logged and counted, and never replaces the episode's result."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await close()
    except _FAILURES as error:
        log.warning("closing the %s of episode %s failed: %s", what, episode, _summary(error))
        return 1
    return 0


def _summary(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the exception's class may be anybody's
        return f"{type(error).__name__} (its text cannot be read)"


def _error_text(outcome: _Outcome) -> str | None:
    """Type and message in the first line, then the innermost frames. None where no error ended it."""
    error = outcome.error
    if error is None or outcome.end in ("cancelled", "context_full", "max_tokens"):
        return None if error is None else _summary(error)
    frames = traceback.format_exception(error, limit=-6)
    return f"{_summary(error)}\n{''.join(frames)}"[:8000].rstrip()


def _metrics(episode: Episode, wall_s: float, close_errors: int) -> dict[str, float]:
    turns: list[Turn] = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    results = [result for turn in turns for result in turn.tool_results]
    return {
        "rollout/turns": len(turns),
        "rollout/sampled_tokens": sum(turn.sampled[1] - turn.sampled[0] for turn in turns),
        "rollout/context_tokens": sum(turn.observation[1] - turn.observation[0] for turn in turns),
        "rollout/generate_s": sum(turn.timing.generate_s for turn in turns),
        "rollout/tools_s": sum(turn.timing.tools_s for turn in turns),
        "rollout/wall_s": wall_s,
        "rollout/tool_calls": len(results),
        "rollout/malformed_calls": sum(result.error_kind == "malformed" for result in results),
        "rollout/tool_errors": sum(result.error_kind != "" for result in results),
        "rollout/abnormal_failures": sum(result.failure == "abnormal" for result in results),
        "rollout/close_errors": close_errors,
        "rollout/skipped_overlong": float(episode.end == "context_full" and not turns),
    }
