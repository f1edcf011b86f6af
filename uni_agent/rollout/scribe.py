"""The scribe: answers an agent's messages from a token engine, and writes down every token.

Chat requests flow in, replies flow out; beneath, one tape of tokens grows per agent name. A tape
only ever grows at its end: what the engine sampled is never decoded and encoded again. The scribe
knows no environments, tools or rewards: it is told by `record` what a turn led to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from uni_agent.errors import ContextFull, EngineError
from uni_agent.protocols import ChatRequest, Engine, Policy, Renderer, Reply
from uni_agent.types import (
    Chunk,
    Completion,
    Message,
    Sampling,
    Timing,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
    derive_seed,
)


class RecordingPolicy(Policy, Protocol):
    """A policy that keeps what it sampled: the scribe, or a chat endpoint's client.

    `trainable` is False where the tokens are not an engine's own.
    """

    @property
    def trainable(self) -> bool: ...

    def record(self, tool_results: Sequence[ToolResult], reward: float | None) -> None:
        """Attach to the latest turn what its tool calls and the environment's step returned."""
        ...

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Everything that was sampled so far."""
        ...

    async def close(self) -> None:
        """Release what the session holds; the trajectories stay readable."""
        ...


MakePolicy = Callable[[str, int], RecordingPolicy]
"""(episode id, episode seed) -> the policy of one episode."""


class TokenBudgetSpent(ContextFull):
    """The episode has sampled all the tokens that it may; it ends truncated, as `max_tokens`."""


@dataclass(slots=True)
class _TurnDraft:
    """A turn that may still learn what it led to."""

    observation: tuple[int, int]
    observed: tuple[Message, ...]
    message: Message
    completion: Completion
    sampling: Sampling
    started_s: float
    generate_s: float
    tools_s: float = 0.0
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None

    def finished(self) -> Turn:
        start = self.observation[1]
        return Turn(
            observation=self.observation,
            sampled=(start, start + len(self.completion.token_ids)),
            observed=self.observed,
            message=self.message,
            finish=self.completion.finish,
            sampling=self.sampling,
            tool_results=self.tool_results,
            reward=self.reward,
            timing=Timing(self.started_s, self.generate_s, self.tools_s),
        )


@dataclass(slots=True)
class _Tape:
    """A trajectory while it is written: `prompt_ids` and `completion_ids` of its latest call.

    `history` are the messages that these tokens stand for, the model's latest one included.
    """

    agent: str
    tools: tuple[ToolSpec, ...]
    prompt_ids: list[int] = field(default_factory=list[int])
    completion_ids: list[int] = field(default_factory=list[int])
    history: tuple[Message, ...] = ()
    turns: list[_TurnDraft] = field(default_factory=list[_TurnDraft])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def new_messages(self, request: ChatRequest) -> tuple[Message, ...] | None:
        """What the request adds to this tape's history; None when it does not continue it.

        Comparing tuples looks at identity first, so an agent that hands back the same message
        objects pays one pointer comparison per old message.
        """
        known = len(self.history)
        if request.messages[:known] != self.history or request.tools != self.tools:
            return None
        return request.messages[known:]

    def trajectory(self) -> Trajectory:
        size = self.num_tokens
        token_ids = np.asarray(self.prompt_ids + self.completion_ids, np.int32)
        sampled = np.zeros(size, np.bool_)
        logprobs = np.zeros(size, np.float32)
        versions = np.full(size, -1, np.int32)
        turns = tuple(draft.finished() for draft in self.turns)
        for draft, turn in zip(self.turns, turns, strict=True):
            span = slice(*turn.sampled)
            sampled[span] = True
            logprobs[span] = draft.completion.logprobs
            versions[span] = draft.completion.versions
        return Trajectory(self.agent, token_ids, sampled, logprobs, versions, turns)


class _Place(NamedTuple):
    """Where a call goes: the tape, its prompt, and the messages that are new on it."""

    tape: _Tape
    prompt_ids: list[int]
    observed: tuple[Message, ...]


class Scribe:
    """The Policy of one episode over a token engine.

    A request that continues the tape of its agent name (same tools, same messages, the model's own
    latest message as it was parsed) is appended to the sampled tokens. Anything else (rewritten or
    forked history, other tools, a format that cannot continue exactly) closes that tape and starts
    one whose rendered prompt is context. A call that is in flight owns its tape, so calls at the
    same time never share one.

    `max_tokens` bounds the sampled tokens of the whole episode; None leaves it to the context.
    """

    trainable = True

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        *,
        session: str,
        seed: int,
        max_tokens: int | None = None,
    ) -> None:
        stops = dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._engine = engine
        self._renderer = renderer
        self._sampling = replace(sampling, stop_token_ids=tuple(stops))
        self._session = session
        self._seed = seed
        self._max_tokens = max_tokens
        self._num_sampled = 0
        self._num_calls = 0
        self._tapes: list[_Tape] = []
        self._open: dict[str, _Tape] = {}
        self._latest: _TurnDraft | None = None
        self._latest_at = 0.0
        self._started_at = time.perf_counter()

    @property
    def seed(self) -> int:
        """The episode's seed; turn n samples with derive_seed(seed, n)."""
        return self._seed

    async def chat(self, request: ChatRequest) -> Reply:
        """Answer, and write down the sampled tokens.

        A turn that was cut (finish "length" or "cancelled") keeps its text and loses its tool calls:
        half a call is neither run nor counted as malformed.

        Raises ContextFull (TokenBudgetSpent for the episode's own limit) before the engine is asked
        when no token fits, EngineError, MessageError.
        """
        tape = self._open.pop(request.agent, None)
        try:
            place = self._place(tape, request)
            reply = await self._call(place, request)
        except Exception:
            if tape is not None:
                self._open.setdefault(request.agent, tape)
            raise
        self._open[request.agent] = place.tape
        return reply

    def record(self, tool_results: Sequence[ToolResult], reward: float | None) -> None:
        """Attach to the latest turn what its tool calls and the environment's step returned.

        Tool seconds are the time from the reply until now. Before the first turn there is nothing
        to attach to, and the call does nothing.
        """
        turn = self._latest
        if turn is None:
            return
        turn.tool_results = tuple(tool_results)
        turn.reward = reward
        turn.tools_s = time.perf_counter() - self._latest_at

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory per tape, in the order in which they were begun."""
        return tuple(tape.trajectory() for tape in self._tapes)

    async def close(self) -> None:
        """Let the engine forget this session's cache."""
        await self._engine.end_session(self._session)

    def _place(self, tape: _Tape | None, request: ChatRequest) -> _Place:
        new = tape.new_messages(request) if tape is not None else None
        if tape is not None and new is not None:
            added = self._renderer.extend(tape.prompt_ids, tape.completion_ids, new, request.tools)
            if added is not None:
                return _Place(tape, [*tape.prompt_ids, *tape.completion_ids, *added], new)
        prompt_ids = list(self._renderer.render(request.messages, request.tools))
        return _Place(_Tape(request.agent, request.tools), prompt_ids, request.messages)

    async def _call(self, place: _Place, request: ChatRequest) -> Reply:
        num_prompt = len(place.prompt_ids)
        sampling = replace(
            self._sampling,
            max_tokens=self._room(num_prompt),
            seed=derive_seed(self._seed, self._num_calls),
        )
        self._num_calls += 1
        began = time.perf_counter()
        chunks: list[Chunk] = []
        try:
            completion = await self._generate(place.prompt_ids, sampling, chunks)
        except asyncio.CancelledError:
            if chunks:
                self._write(place, request, _cut(chunks), sampling, began)
            raise
        message = self._write(place, request, completion, sampling, began)
        return Reply(message, completion.finish, num_prompt, len(completion.token_ids))

    def _room(self, num_prompt: int) -> int:
        """Tokens that the next call may sample: the least of turn, context and episode limits."""
        context = self._engine.context_size
        if num_prompt >= context:
            raise ContextFull(
                f"the prompt of call {self._num_calls} of episode {self._session} has {num_prompt} tokens, "
                f"the context holds {context}; shorten the prompt or raise the context size"
            )
        room = min(self._sampling.max_tokens, context - num_prompt)
        if self._max_tokens is None:
            return room
        left = self._max_tokens - self._num_sampled
        if left < 1:
            raise TokenBudgetSpent(
                f"episode {self._session} has sampled {self._num_sampled} tokens, its limit is "
                f"{self._max_tokens}; raise max_tokens of the episode if it should go on"
            )
        return min(room, left)

    async def _generate(self, prompt_ids: list[int], sampling: Sampling, chunks: list[Chunk]) -> Completion:
        completion: Completion | None = None
        async for part in self._engine.generate(prompt_ids, sampling, self._session):
            if isinstance(part, Chunk):
                chunks.append(part)
            else:
                completion = part
        where = f"call {self._num_calls - 1} of episode {self._session}"
        if completion is None:
            raise EngineError(f"{where} ended without a completion; the engine must end with one")
        if len(completion.token_ids) > sampling.max_tokens:
            raise EngineError(
                f"{where} returned {len(completion.token_ids)} tokens, max_tokens was {sampling.max_tokens}"
            )
        if not np.isfinite(completion.logprobs).all():
            raise EngineError(f"{where} returned a logprob that is not finite; check the model's weights")
        return completion

    def _write(
        self, place: _Place, request: ChatRequest, completion: Completion, sampling: Sampling, began: float
    ) -> Message:
        tape = place.tape
        completion_ids: list[int] = completion.token_ids.tolist()
        message = self._renderer.parse(completion_ids, request.tools)
        if completion.finish != "stop" and message.tool_calls:
            message = replace(message, tool_calls=())
        now = time.perf_counter()
        draft = _TurnDraft(
            observation=(tape.num_tokens, len(place.prompt_ids)),
            observed=place.observed,
            message=message,
            completion=completion,
            sampling=sampling,
            started_s=began - self._started_at,
            generate_s=now - began,
        )
        if not tape.turns:
            self._tapes.append(tape)
        tape.turns.append(draft)
        tape.prompt_ids = place.prompt_ids
        tape.completion_ids = completion_ids
        tape.history = (*request.messages, message)
        self._num_sampled += len(completion_ids)
        self._latest, self._latest_at = draft, now
        return message


@dataclass(frozen=True, slots=True)
class ScribeFactory:
    """Makes the Scribe of an episode: the `make_policy` of runs that train."""

    engine: Engine
    renderer: Renderer
    sampling: Sampling
    max_tokens: int | None = None

    def __call__(self, episode_id: str, seed: int) -> Scribe:
        """Open a session named after the episode."""
        return Scribe(
            self.engine,
            self.renderer,
            self.sampling,
            session=episode_id,
            seed=seed,
            max_tokens=self.max_tokens,
        )


def _cut(chunks: Sequence[Chunk]) -> Completion:
    """What a cancelled call had sampled."""
    return Completion(
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.versions for chunk in chunks]),
        "cancelled",
    )
