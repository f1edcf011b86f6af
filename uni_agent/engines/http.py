"""A policy over any OpenAI-compatible chat endpoint, for evaluation and data.

Messages go out and come back; there are no token ids, so what it records are turns without tokens,
and its episodes are not trainable. Nothing here knows environments or tools' insides.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import aiohttp
import numpy as np
import stamina

from uni_agent.engines.http_wire import read_reply, request_body
from uni_agent.errors import ContextFull, EngineError
from uni_agent.protocols import ChatRequest, Reply
from uni_agent.types import Message, Sampling, Timing, ToolResult, Trajectory, Turn, derive_seed

_LONGEST_WAIT_S = 60.0
_CONTEXT_ERRORS = ("context_length_exceeded", "maximum context length", "context size", "too many tokens")


class _Refused(EngineError):
    """An answer with an error status; `wait_s` is what the server asked for in Retry-After."""

    def __init__(self, message: str, status: int, wait_s: float | None) -> None:
        super().__init__(message)
        self.status, self.wait_s = status, wait_s


class ChatEndpoint:
    """One endpoint and its connections; shared by all episodes of a run. An async context manager.

    `url` ends before "/chat/completions" ("http://host:8000/v1"). A call is tried `attempts` times:
    after 429 (waiting as Retry-After says, up to a minute), 408, 5xx, a time-out of `timeout_s`, or
    a lost connection; never after another 4xx.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str = "",
        timeout_s: float = 120.0,
        attempts: int = 5,
        max_connections: int = 256,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self._model, self._api_key = model, api_key
        self._timeout_s, self._attempts, self._max_connections = timeout_s, attempts, max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatEndpoint:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=self._max_connections),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def complete(self, request: ChatRequest, sampling: Sampling) -> Reply:
        """Ask once, with retries. Raises EngineError naming URL and status; ContextFull."""
        body = request_body(self._model, request, sampling)
        try:
            async for attempt in stamina.retry_context(
                on=_retry, attempts=self._attempts, timeout=None, wait_initial=0.5, wait_max=20.0
            ):
                with attempt:
                    return read_reply(await self._post(body), self.url)
        except (aiohttp.ClientError, TimeoutError) as error:
            what = f"no answer in {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise EngineError(
                f"{self.url} failed after {self._attempts} attempts: {type(error).__name__}: {what}"
            ) from error
        raise AssertionError("retry_context either returns or raises")

    async def _post(self, body: Mapping[str, Any]) -> Any:
        if self._session is None:
            raise EngineError(f"the endpoint {self.url} is not open; use `async with ChatEndpoint(...)`")
        async with self._session.post(self.url, json=body) as response:
            text = await response.text(errors="replace")
            if response.status >= 400:
                raise self._refusal(response.status, response.headers.get("Retry-After"), text)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineError(
                f"{self.url} answered status {response.status} with text that is not JSON: {text[:200]!r}"
            ) from error

    def _refusal(self, status: int, retry_after: str | None, text: str) -> Exception:
        message = f"{self.url} answered status {status} for model {self._model!r}: {_error_text(text)}"
        if status in (400, 413, 422) and any(mark in text.lower() for mark in _CONTEXT_ERRORS):
            return ContextFull(message)
        try:
            wait_s = None if retry_after is None else max(0.0, float(retry_after))
        except ValueError:  # an HTTP date: the usual back-off will do
            wait_s = None
        return _Refused(message, status, wait_s)


@dataclass(slots=True)
class _Recorded:
    """One call, as it is to stand in the episode."""

    agent: str
    observed: tuple[Message, ...]
    reply: Reply
    sampling: Sampling
    timing: Timing
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None

    def turn(self) -> Turn:
        return Turn(
            observation=(0, 0),
            sampled=(0, 0),
            observed=self.observed,
            message=self.reply.message,
            finish=self.reply.finish,
            sampling=self.sampling,
            tool_results=self.tool_results,
            reward=self.reward,
            timing=self.timing,
        )


@dataclass(slots=True)
class HttpPolicy:
    """The policy of one episode over a chat endpoint; it keeps the transcript, without tokens.

    Where `sampling` has a seed, turn n asks for one derived from it, the episode's seed and n;
    without, no seed is sent (some endpoints refuse the field).
    """

    endpoint: ChatEndpoint
    sampling: Sampling
    seed: int
    _calls: list[_Recorded] = field(default_factory=list[_Recorded])
    _latest: _Recorded | None = None
    _latest_at: float = 0.0
    _history: dict[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])
    _num_calls: int = 0
    _started_at: float = field(default_factory=time.perf_counter)

    @property
    def trainable(self) -> bool:
        """False: the endpoint's tokens and logprobs are not known."""
        return False

    @property
    def turns(self) -> tuple[tuple[tuple[Message, ...], Reply], ...]:
        """(messages that were new to the model, its reply) per call, in order."""
        return tuple((call.observed, call.reply) for call in self._calls)

    async def chat(self, request: ChatRequest) -> Reply:
        """Answer. Raises EngineError naming URL and status; ContextFull where the endpoint says so."""
        sampling = self.sampling
        if sampling.seed is not None:
            # 31 bits: what every endpoint's integer takes
            seed = derive_seed(sampling.seed, self.seed, self._num_calls) & 0x7FFFFFFF
            sampling = replace(sampling, seed=seed)
        self._num_calls += 1
        began = time.perf_counter()
        reply = await self.endpoint.complete(request, sampling)
        now = time.perf_counter()
        known = self._history.get(request.agent, ())
        continues = request.messages[: len(known)] == known
        call = _Recorded(
            agent=request.agent,
            observed=request.messages[len(known) :] if continues else request.messages,
            reply=reply,
            sampling=sampling,
            timing=Timing(started_s=began - self._started_at, generate_s=now - began),
        )
        self._history[request.agent] = (*request.messages, reply.message)
        self._calls.append(call)
        self._latest, self._latest_at = call, now
        return reply

    def record(self, tool_results: Sequence[ToolResult], reward: float | None) -> None:
        """Attach to the latest turn what its tool calls and the environment's step returned."""
        call = self._latest
        if call is None:
            return
        call.tool_results = tuple(tool_results)
        call.reward = reward
        call.timing = replace(call.timing, tools_s=time.perf_counter() - self._latest_at)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory per agent name, with its turns and no tokens."""
        nothing = np.zeros(0, np.int32)
        return tuple(
            Trajectory(
                agent=agent,
                token_ids=nothing,
                sampled=np.zeros(0, np.bool_),
                logprobs=np.zeros(0, np.float32),
                versions=nothing,
                turns=tuple(call.turn() for call in self._calls if call.agent == agent),
            )
            for agent in dict.fromkeys(call.agent for call in self._calls)
        )

    async def close(self) -> None:
        """Nothing to release: connections belong to the endpoint."""


class HttpPolicyFactory:
    """Makes the HttpPolicy of an episode: `factory(episode_id, seed)`. An async context manager."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str = "",
        sampling: Sampling | None = None,
        timeout_s: float = 120.0,
        attempts: int = 5,
    ) -> None:
        self.endpoint = ChatEndpoint(
            url, model=model, api_key=api_key, timeout_s=timeout_s, attempts=attempts
        )
        self._sampling = sampling or Sampling()

    async def __aenter__(self) -> HttpPolicyFactory:
        await self.endpoint.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.endpoint.__aexit__(*exc)

    def __call__(self, episode: str, seed: int) -> HttpPolicy:
        """The policy of one episode; the endpoint itself knows no sessions."""
        return HttpPolicy(self.endpoint, self._sampling, seed)


def _retry(error: Exception) -> bool | float:
    """Whether to try again, and after how many seconds where the server said so."""
    if isinstance(error, _Refused):
        if error.status not in (408, 429) and error.status < 500:
            return False
        if error.wait_s is None:
            return True
        return error.wait_s if error.wait_s <= _LONGEST_WAIT_S else False
    return isinstance(error, asyncio.TimeoutError | aiohttp.ClientError)


def _error_text(text: str) -> str:
    """The server's own words, where they are in one of the usual places."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300].strip() or "(no text)"
    if isinstance(body, dict):
        error = cast(dict[str, Any], body).get("error", body)
        if isinstance(error, dict):
            error = cast(dict[str, Any], error).get("message", error)
        return str(error)[:300]
    return text[:300]
