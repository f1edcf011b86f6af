"""The engine's thread: commands, prefill, decode, sampling, answers, iteration after iteration.

Everything here runs on one thread, and only `post` and `call` may be used from others. A command
(a new request, a cancellation, new weights, a pause) takes effect between two iterations. Answers
go to the event loops that asked, at most one wake-up per loop and iteration.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from uni_agent.engines.local_decoder import Decoder
from uni_agent.engines.local_request import Item, Request
from uni_agent.engines.local_slots import Int64Array, Slots
from uni_agent.engines.local_step import Counters, Stepper
from uni_agent.engines.local_weights import apply_weights
from uni_agent.errors import EngineError
from uni_agent.types import Chunk, Completion, Finish, Float32Array, Int32Array, Weights

_LOG = logging.getLogger(__name__)
_FAILURES_TO_DIE = 3

T = TypeVar("T")


class EngineLoop:
    """The thread's body and its state. Requests that find no room wait in the order of arrival.

    After three failed iterations in a row the engine is dead: each request then fails at once, with
    the reason.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots,
        *,
        max_running: int,
        prefill_tokens: int,
        chunk_interval_s: float | None,
        version: int,
    ) -> None:
        self.version = version
        self._decoder, self._slots = decoder, slots
        self._stepper = Stepper(
            decoder,
            slots,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            sampled=self._append,
            refused=self._send,
        )
        self._chunk_interval_s = chunk_interval_s
        self._next_chunk_s = 0.0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closing = self._closed = False
        self._paused = False
        self._dead: str | None = None
        self._failures = 0
        self._waiting: deque[Request] = deque()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Request, Item]]] = {}

    # --- from other threads ---

    def post(self, command: Callable[[], None]) -> None:
        """Have a command run between two iterations. Raises EngineError when the engine is closed."""
        with self._gate:
            if self._closed:
                raise EngineError("the engine is closed; make a new one")
            self._inbox.put(command)

    def call(self, command: Callable[[], T]) -> Future[T]:
        """As `post`; the future gets what the command returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.post(run)
        return future

    # --- commands: on the engine's thread ---

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self._dead is not None:
            self._send(request, EngineError(self._dead))
        else:
            self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Free what a request holds; nothing is sent."""
        if request.done:
            return
        request.done = True
        if request.row >= 0:
            self._slots.release(request.row, keep=True)
        elif request in self._waiting:
            self._waiting.remove(request)

    def end_session(self, session: str) -> None:
        """Forget a session; requests of it that still run or wait end as cancelled."""
        for row in self._slots.active_rows().tolist():
            if self._slots.session[row] == session:
                self._finish(row, "cancelled")
        for request in [r for r in self._waiting if r.session == session]:
            self._waiting.remove(request)
            empty = np.zeros(0, np.int32)
            self._send(request, Completion(empty, np.zeros(0, np.float32), empty, "cancelled"))
        self._slots.forget(session)

    def pause(self) -> None:
        """Decode nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on; parameter objects that were replaced meanwhile are looked up again."""
        self._decoder.bind()
        self._paused = False

    def load_weights(self, weights: Weights, partial: bool) -> None:
        """Take new weights; what the old ones cached is dropped, running requests go on from their tokens."""
        apply_weights(self._decoder.module, weights.location, partial=partial)
        self._decoder.bind()
        self._stepper.invalidate()
        self.version = weights.version

    def take_counters(self) -> tuple[Counters, int, int]:
        """The counters since the last call, and how many requests run and wait."""
        taken, self._stepper.counters = self._stepper.counters, Counters()
        return taken, int(self._slots.active.sum()), len(self._waiting)

    def stop(self) -> None:
        """End the thread; every open request fails."""
        self._closing = True

    # --- the loop ---

    def run(self) -> None:
        """Body of the engine's thread."""
        reason = "the engine was closed while the request was open"
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_commands()
                    if self._closing or self._paused or not self._has_work():
                        self._flush()
                        continue
                    try:
                        self._stepper.iterate(self._waiting)
                        self._failures = 0
                    except Exception as error:
                        self._fail(error)
                    self._flush()
        except BaseException as error:
            reason = f"the engine's thread died: {type(error).__name__}: {error}"
            raise
        finally:
            with self._gate:
                self._closed = True
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._fail_all(EngineError(reason), waiting=True)
            self._flush()

    def _has_work(self) -> bool:
        return bool(self._waiting) or bool(self._slots.active.any())

    def _take_commands(self) -> None:
        """Run what came in; wait for it when there is nothing else to do."""
        if self._paused or not self._has_work():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _append(self, rows: Int64Array, ids: Int32Array, logprobs: Float32Array) -> None:
        """Write down one sampled token per row, and end the requests that it ends."""
        slots = self._slots
        bad = ~np.isfinite(logprobs)
        for row in rows[bad].tolist():
            request = self._drop(row)
            self._send(
                request,
                EngineError(
                    f"session {request.session!r}: the model's logits are not finite under version "
                    f"{self.version}; check the weights"
                ),
            )
        if bad.any():
            rows, ids, logprobs = rows[~bad], ids[~bad], logprobs[~bad]
        at = slots.length[rows]
        slots.tokens[rows, at] = ids
        slots.logprobs[rows, at] = logprobs
        slots.versions[rows, at] = self.version
        slots.length[rows] = at + 1
        self._stepper.counters.sampled += len(rows)
        stopped = (slots.stop_ids[rows] == ids[:, None]).any(1)
        full = at + 1 >= slots.limit[rows]
        for i, row in enumerate(rows.tolist()):
            request = slots.request[row]
            if request is not None and request.matcher is not None:
                stopped[i] |= self._matches(request, int(ids[i]))
        for i in np.flatnonzero(stopped | full).tolist():
            row = int(rows[i])
            if slots.active[row]:
                self._finish(row, "stop" if stopped[i] else "length")

    def _matches(self, request: Request, token: int) -> bool:
        """Whether a token completes a stop string; a `decode` that raises fails its request only."""
        assert request.matcher is not None
        try:
            return request.matcher.push(token)
        except Exception as error:
            self._drop(request.row)
            self._send(
                request,
                EngineError(
                    f"session {request.session!r}: decode raised {type(error).__name__} while looking for "
                    f"stop strings: {error}"
                ),
            )
            return False

    def _finish(self, row: int, finish: Finish) -> None:
        slots = self._slots
        request = slots.request[row]
        assert request is not None
        if self._chunk_interval_s is not None:
            self._send_chunk(request)
        start, end = int(slots.prompt[row]), int(slots.length[row])
        completion = Completion(
            slots.tokens[row, start:end].copy(),
            slots.logprobs[row, start:end].copy(),
            slots.versions[row, start:end].copy(),
            finish,
        )
        slots.release(row, keep=True)
        self._stepper.counters.finished += 1
        self._send(request, completion)

    # --- failures ---

    def _drop(self, row: int) -> Request:
        request = self._slots.request[row]
        assert request is not None
        self._slots.release(row, keep=False)
        return request

    def _fail(self, error: Exception) -> None:
        """An iteration raised: fail its requests, distrust the caches, and die when it goes on so."""
        self._failures += 1
        reason = f"the engine failed in an iteration: {type(error).__name__}: {error}"
        if self._failures >= _FAILURES_TO_DIE:
            self._dead = f"the engine is dead after {self._failures} failures in a row, the last: {reason}"
            reason = self._dead
        _LOG.warning("%s", reason, exc_info=error)
        failure = EngineError(reason)
        failure.__cause__ = error
        self._fail_all(failure, waiting=self._dead is not None)
        self._stepper.invalidate()

    def _fail_all(self, failure: EngineError, *, waiting: bool) -> None:
        for row in self._slots.active_rows().tolist():
            self._send(self._drop(row), failure)
        while waiting and self._waiting:
            self._send(self._waiting.popleft(), failure)

    # --- answers ---

    def _send(self, request: Request, item: Item) -> None:
        if not isinstance(item, Chunk):
            request.done = True
        self._outbox.setdefault(request.loop, []).append((request, item))

    def _send_chunk(self, request: Request) -> None:
        slots, row = self._slots, request.row
        start, end = int(slots.prompt[row]) + request.sent, int(slots.length[row])
        if end > start:
            request.sent += end - start
            part = slice(start, end)
            chunk = Chunk(
                slots.tokens[row, part].copy(),
                slots.logprobs[row, part].copy(),
                slots.versions[row, part].copy(),
            )
            self._send(request, chunk)

    def _flush(self) -> None:
        """Hand out what is ready: one call per event loop."""
        now = time.monotonic()
        if self._chunk_interval_s is not None and now >= self._next_chunk_s:
            self._next_chunk_s = now + self._chunk_interval_s
            for row in self._slots.active_rows().tolist():
                request = self._slots.request[row]
                assert request is not None
                self._send_chunk(request)
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        for loop, items in outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # that event loop is closed: nobody will read the answers
                for request, _ in items:
                    self.cancel(request)


def _deliver(items: list[tuple[Request, Item]]) -> None:
    for request, item in items:
        request.mailbox.put_nowait(item)
