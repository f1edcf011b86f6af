"""The local engine: continuous batching on torch, in this process.

Token ids in; ids, logprobs and versions out. One thread of its own does the work
(`loop.EngineLoop`), so no event loop is ever blocked, and any event loop may ask.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch
from torch import nn

from uni_agent.engines.local.choice import EngineShape, choose
from uni_agent.engines.local.loop import EngineLoop
from uni_agent.engines.local.request import Request
from uni_agent.engines.local.stop import Decode, StopMatcher
from uni_agent.errors import EngineError
from uni_agent.types import Chunk, Completion, Sampling, Weights, derive_seed


class LocalEngine:
    """Samples from a Hugging Face causal LM; satisfies `protocols.Engine`.

    `module` may be the one that the learner trains (plain or PEFT LoRA, whose sum W + BA is what
    samples), of any type: dense families take the fast path of `dense`, others their own forward
    (`module`, `recurrent`). The engine holds what it derives from the parameters: a learner
    that steps in place calls `pause`, steps, `load_weights(Weights(version, module))`, `resume`. It lives
    on the module's device and computes in `dtype` (None: the module's).

    `max_running` requests run together. Keys and values take at most `cache_bytes`, in blocks that a
    group's prompt and an episode's turns share; None is what `max_running` full contexts need, at most
    4 GiB and a quarter of the free memory. When they run out, idle prefixes go first, then requests wait,
    then the latest is put back and computed again later. `decode` turns token ids into text and is needed
    for stop strings. `seed` feeds requests that bring none. `chunk_interval_s` is how often a running
    request yields a chunk: 0 after each iteration, None never (only the Completion comes).
    `prefill_tokens` is how many prompt tokens are computed between two decode iterations at most.
    `batch_invariant`: a request with a seed gives the same bits alone or beside others, with or without
    cached prefixes; slower. `native` kernels: None takes them where they can be had, False never.

    Raises ModelError for a model that cannot run here, EngineError for a setting that makes no sense.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        context_size: int,
        dtype: torch.dtype | None = None,
        max_running: int = 64,
        cache_bytes: int | None = None,
        decode: Decode | None = None,
        version: int = 0,
        seed: int = 0,
        chunk_interval_s: float | None = 0.1,
        prefill_tokens: int = 1024,
        batch_invariant: bool = False,
        native: bool | None = None,
    ) -> None:
        if max_running < 1:
            raise EngineError(f"max_running is {max_running}; expected 1 or more")
        if prefill_tokens < 1:
            raise EngineError(f"prefill_tokens is {prefill_tokens}; expected 1 or more")
        if context_size < 2:
            raise EngineError(
                f"context_size is {context_size}; expected room for a prompt and a token, 2 or more"
            )
        choice = choose(
            module,
            EngineShape(
                context_size=context_size,
                dtype=dtype,
                max_running=max_running,
                cache_bytes=cache_bytes,
                prefill_tokens=prefill_tokens,
                batch_invariant=batch_invariant,
                native=native,
            ),
        )
        self._context_size, self._decode, self._seed = context_size, decode, seed
        self._vocab_size = choice.vocab_size
        self._num_requests = 0
        self._loop = EngineLoop(choice.build, chunk_interval_s=chunk_interval_s, version=version)
        self._thread = threading.Thread(target=self._loop.run, name="local-engine", daemon=True)
        self._thread.start()
        # also at interpreter exit: a daemon thread inside torch must not outlive it
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread)

    @property
    def version(self) -> int:
        """The policy version that samples the next token."""
        return self._loop.version

    @property
    def context_size(self) -> int:
        """The most tokens (prompt and completion) that one request may hold."""
        return self._context_size

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str
    ) -> AsyncIterator[Chunk | Completion]:
        """Yield chunks that together hold all tokens, then the Completion.

        max_tokens is cut to what the context leaves. Finish is "stop" (a stop id or string, whose
        last token is kept), "length", or "cancelled" when `end_session` came meanwhile. Closing the
        iterator frees its place at the next iteration. Raises EngineError for a prompt that is
        empty, too long or outside the vocabulary, and when the engine fails.
        """
        request = self._request(prompt_ids, sampling, session)
        self._loop.post(lambda: self._loop.add(request))
        try:
            while True:
                item = await request.mailbox.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if isinstance(item, Completion):
                    return
        finally:
            if not request.done:
                self._post_cancel(request)

    async def load_weights(self, weights: Weights, *, partial: bool = False) -> None:
        """Take new weights between two iterations, all or nothing.

        `weights.location` is the module itself (then it is only read anew), another module, a dict of
        tensors, or a safetensors file or folder; what is not the module itself is copied into it.
        `partial` allows parameters to be missing. Running requests go on from their tokens under the
        new version, no cache of the old one is used again. Raises EngineError, and then neither
        weights nor version have changed.
        """
        await asyncio.wrap_future(self._loop.call(lambda: self._loop.load_weights(weights, partial)))

    async def pause(self) -> None:
        """Return once the current iteration is over and no other will begin."""
        await asyncio.wrap_future(self._loop.call(self._loop.pause))

    async def resume(self) -> None:
        """Continue what `pause` stopped. Parameters are not looked at: `load_weights` does that."""
        await asyncio.wrap_future(self._loop.call(self._loop.resume))

    async def end_session(self, session: str) -> None:
        """Forget a session's cache; requests of it that still run end with finish "cancelled"."""
        await asyncio.wrap_future(self._loop.call(lambda: self._loop.end_session(session)))

    async def stats(self) -> dict[str, float]:
        """Metrics since the previous call.

        tokens_per_s is sampled tokens per second of work (idle time not counted), reused_tokens are
        those of prompts that were in the cache already, copied_tokens those of them in blocks that had to
        be copied; preempted counts requests that were put back, evicted blocks that were forgotten for
        lack of room. running_mean is over decode iterations; running, waiting and cache_blocks_used (a
        fraction; idle prefixes count) are of this moment.
        """
        counters, running, waiting, used = await asyncio.wrap_future(
            self._loop.call(self._loop.take_counters)
        )
        busy_s = counters.prefill_s + counters.decode_s
        return {
            "engine/sampled_tokens": counters.sampled,
            "engine/tokens_per_s": counters.sampled / busy_s if busy_s else 0.0,
            "engine/prefill_tokens": counters.prefilled,
            "engine/reused_tokens": counters.reused,
            "engine/copied_tokens": counters.copied,
            "engine/finished": counters.finished,
            "engine/preempted": counters.preempted,
            "engine/evicted": counters.evicted,
            "engine/cache_blocks_used": used,
            "engine/running_mean": counters.decode_rows / counters.decodes if counters.decodes else 0.0,
            "engine/running": running,
            "engine/waiting": waiting,
            "engine/prefill_s": counters.prefill_s,
            "engine/decode_s": counters.decode_s,
        }

    async def close(self) -> None:
        """End the thread; open requests fail with EngineError. Closing twice is fine."""
        await asyncio.to_thread(self._finalizer)

    def _post_cancel(self, request: Request) -> None:
        try:
            self._loop.post(lambda: self._loop.cancel(request))
        except EngineError:
            return  # closed: there is nothing left to free

    def _request(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Request:
        prompt = np.asarray(prompt_ids, np.int64)
        room = self._context_size - len(prompt)
        if len(prompt) == 0:
            raise EngineError(f"session {session!r}: the prompt has 0 tokens; expected 1 or more")
        if room < 1:
            raise EngineError(
                f"session {session!r}: the prompt has {len(prompt)} tokens and the context "
                f"{self._context_size}; no room is left to sample"
            )
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise EngineError(
                f"session {session!r}: the prompt has ids from {prompt.min()} to {prompt.max()}; the model "
                f"knows 0 to {self._vocab_size - 1}; do tokenizer and model belong together?"
            )
        _check(sampling, session, self._vocab_size)
        matcher = None
        if sampling.stop:
            if self._decode is None:
                raise EngineError(
                    f"session {session!r} asks for stop strings, and the engine was made without `decode`; "
                    "pass decode=renderer.decode"
                )
            matcher = StopMatcher(sampling.stop, self._decode)
        self._num_requests += 1
        seed = sampling.seed
        return Request(
            prompt=prompt.astype(np.int32),
            sampling=sampling,
            session=session,
            max_tokens=min(sampling.max_tokens, room),
            seed=derive_seed(self._seed, "engine", self._num_requests) if seed is None else seed,
            matcher=matcher,
            loop=asyncio.get_running_loop(),
            arrival=self._num_requests,
        )


def _check(sampling: Sampling, session: str, vocab_size: int) -> None:
    """Raise EngineError for settings that mean nothing."""
    wrong = None
    if sampling.max_tokens < 1:
        wrong = f"max_tokens {sampling.max_tokens}; expected 1 or more"
    elif not 0 <= sampling.temperature < float("inf"):
        wrong = f"temperature {sampling.temperature}; expected 0 (greedy) or more"
    elif not 0 < sampling.top_p <= 1:
        wrong = f"top_p {sampling.top_p}; expected above 0 and at most 1"
    elif sampling.top_k < 0:
        wrong = f"top_k {sampling.top_k}; expected 0 (off) or more"
    elif any(not 0 <= token < vocab_size or math.isnan(value) for token, value in sampling.logit_bias):
        wrong = f"a logit bias outside the vocabulary of {vocab_size} tokens, or one that is not a number"
    elif "" in sampling.stop:
        wrong = "an empty stop string; leave it out"
    if wrong is not None:
        raise EngineError(f"session {session!r} asks for {wrong}")


def _stop(loop: EngineLoop, thread: threading.Thread) -> None:
    """End the engine's thread and wait for it, unless this is it (the collector may run anywhere)."""
    try:
        loop.post(loop.stop)
    except EngineError:
        return
    if threading.current_thread() is not thread:
        thread.join()
