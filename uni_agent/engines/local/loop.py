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

from uni_agent.engines.local.request import Drawn, Item, Request
from uni_agent.engines.local.rows import Int64Array
from uni_agent.engines.local.stepper import Counters, Refused, Sampled, Stepper
from uni_agent.engines.local.weights import apply_weights
from uni_agent.errors import EngineError
from uni_agent.types import Chunk, Completion, Finish, Float32Array, Int32Array, Weights

_LOG = logging.getLogger(__name__)
_FAILURES_TO_DIE = 3

T = TypeVar("T")


class EngineLoop:
    """The thread's body and its state. Requests that find no room wait in the order of arrival.

    `build` makes the stepper, given where to hand sampled tokens and refusals. After three failed
    iterations in a row the engine is dead: each request then fails at once, with the reason.
    """

    def __init__(
        self,
        build: Callable[[Sampled, Refused], Stepper],
        *,
        chunk_interval_s: float | None,
        version: int,
    ) -> None:
        self.version = version
        self._stepper = build(self._append, self._send)
        self._rows = self._stepper.rows
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
        """As `post`; the future gets what the command returns or raises. It runs even if nobody waits."""
        future: Future[T] = Future()

        def run() -> None:
            awaited = future.set_running_or_notify_cancel()
            try:
                result = command()
            except Exception as error:
                if awaited:
                    future.set_exception(error)
            else:
                if awaited:
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
            self._stepper.release(request.row, keep=True)
        elif request in self._waiting:
            self._waiting.remove(request)

    def end_session(self, session: str) -> None:
        """Forget a session; requests of it that still run or wait end as cancelled."""
        for row in self._rows.active_rows().tolist():
            if self._rows.of(row).session == session:
                self._finish(row, "cancelled")
        for request in [r for r in self._waiting if r.session == session]:
            self._waiting.remove(request)
            self._answer(request, request.drawn, "cancelled")
        self._stepper.forget(session)

    def pause(self) -> None:
        """Decode nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on, with the weights of the last `load_weights`."""
        self._paused = False

    def load_weights(self, weights: Weights, partial: bool) -> None:
        """Take new weights; what the old ones cached is dropped, running requests go on from their tokens."""
        apply_weights(self._stepper.module, weights.location, partial=partial)
        self._stepper.refresh()
        self._stepper.invalidate()
        self.version = weights.version

    def take_counters(self) -> tuple[Counters, int, int, float]:
        """The counters since the last call, how many requests run and wait, and how full the cache is."""
        taken, self._stepper.counters = self._stepper.counters, Counters()
        return taken, int(self._rows.active.sum()), len(self._waiting), self._stepper.used

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
        return bool(self._waiting) or bool(self._rows.active.any())

    def _take_commands(self) -> None:
        """Run what came in; wait for it when there is nothing else to do."""
        if self._paused or not self._has_work():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _append(self, rows: Int64Array, ids: Int32Array, logprobs: Float32Array) -> None:
        """Write down one sampled token per row, and end the requests that it ends."""
        table = self._rows
        bad = ~np.isfinite(logprobs)
        if bad.any():
            for row in rows[bad].tolist():
                self._fail_row(
                    row, f"the model's logits are not finite under version {self.version}; check the weights"
                )
            rows, ids, logprobs = rows[~bad], ids[~bad], logprobs[~bad]
        table.append(rows, ids, logprobs, self.version)
        self._stepper.counters.sampled += len(rows)
        stopped = (table.stop_ids[rows] == ids[:, None]).any(1)
        if table.matching:
            for i in np.flatnonzero(np.isin(rows, list(table.matching))).tolist():
                stopped[i] |= self._matches(table.of(int(rows[i])), int(ids[i]))
        for i in np.flatnonzero(stopped | (table.length[rows] >= table.limit[rows])).tolist():
            row = int(rows[i])
            if table.active[row]:
                self._finish(row, "stop" if stopped[i] else "length")

    def _matches(self, request: Request, token: int) -> bool:
        """Whether a token completes a stop string; a `decode` that raises fails its request only."""
        assert request.matcher is not None
        try:
            return request.matcher.push(token)
        except Exception as error:
            self._fail_row(
                request.row, f"decode raised {type(error).__name__} while looking for stop strings: {error}"
            )
            return False

    def _finish(self, row: int, finish: Finish) -> None:
        request, drawn = self._rows.of(row), self._rows.drawn(row)
        self._stepper.release(row, keep=True)
        self._stepper.counters.finished += 1
        self._answer(request, drawn, finish)

    def _answer(self, request: Request, drawn: Drawn, finish: Finish) -> None:
        """Send what has not left yet, and the Completion."""
        if self._chunk_interval_s is not None and len(drawn.token_ids) > request.sent:
            ids, logprobs, versions = drawn
            new = slice(request.sent, None)
            self._send(request, Chunk(ids[new], logprobs[new], versions[new]))
        self._send(request, Completion(*drawn, finish))

    # --- failures ---

    def _fail_row(self, row: int, reason: str) -> None:
        request = self._rows.of(row)
        self._stepper.release(row, keep=False)
        self._send(request, EngineError(f"session {request.session!r}: {reason}"))

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
        for row in self._rows.active_rows().tolist():
            request = self._rows.of(row)
            self._stepper.release(row, keep=False)
            self._send(request, failure)
        while waiting and self._waiting:
            self._send(self._waiting.popleft(), failure)

    # --- answers ---

    def _send(self, request: Request, item: Item) -> None:
        if not isinstance(item, Chunk):
            request.done = True
        self._outbox.setdefault(request.loop, []).append((request, item))

    def _flush(self) -> None:
        """Hand out what is ready: one call per event loop."""
        now = time.monotonic()
        if self._chunk_interval_s is not None and now >= self._next_chunk_s:
            self._next_chunk_s = now + self._chunk_interval_s
            for row in self._rows.active_rows().tolist():
                request = self._rows.of(row)
                fresh = self._rows.drawn(row, request.sent)
                if len(fresh.token_ids):
                    request.sent += len(fresh.token_ids)
                    self._send(request, Chunk(*fresh))
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
