"""One iteration's work over the paged cache: admit requests, compute prompts, decode a token for each.

In: waiting requests. Out: sampled tokens, handed to `sampled`. Knows the model and the cache, and
nothing of threads, event loops or answers.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
from torch import nn

from uni_agent.engines.local.attention import Attention, Span
from uni_agent.engines.local.blocks import BLOCK
from uni_agent.engines.local.cache import PagedCache
from uni_agent.engines.local.model import StepModel
from uni_agent.engines.local.request import Request
from uni_agent.engines.local.rows import Int64Array, Rows
from uni_agent.engines.local.sampling import SampleKernel, draw
from uni_agent.engines.local.stepper import Counters, Refused, Sampled
from uni_agent.errors import EngineError
from uni_agent.types import Int32Array

_NO_ROWS: Int64Array = np.zeros(0, np.int64)


class PagedStepper:
    """Runs a StepModel; satisfies `stepper.Stepper`.

    New prompts go before decoding, about `prefill_tokens` of them a pass. A request whose prompt
    begins as one that is being computed waits for it, and finds it in the cache. When blocks run out,
    idle ones are evicted, then the latest request loses its row and is computed again later.
    """

    def __init__(
        self,
        model: StepModel,
        cache: PagedCache,
        rows: Rows,
        attention: Attention,
        *,
        kernel: SampleKernel | None,
        prefill_tokens: int,
        sampled: Sampled,
        refused: Refused,
    ) -> None:
        self.rows, self.counters = rows, Counters()
        self._model, self._cache = model, cache
        self._attention, self._kernel = attention, kernel
        self._prefill_tokens = prefill_tokens
        self._sampled, self._refused = sampled, refused
        self._stale = self._full = False

    @property
    def module(self) -> nn.Module:
        """The module that the model's weights are read from."""
        return self._model.module

    @property
    def used(self) -> float:
        """The fraction of blocks that hold something."""
        return self._cache.pool.used

    def refresh(self) -> None:
        """Take the module's parameters as they are now."""
        self._model.refresh()

    def invalidate(self) -> None:
        """Drop all caches before the next iteration."""
        self._stale = True

    def release(self, row: int, *, keep: bool) -> None:
        """Free a row; `keep` what it computed for the session's next turn, or wipe it."""
        if not keep:
            self._cache.discard(row)
        else:
            if not self._stale:
                self._publish(row)
            self._cache.release(row)
        self.rows.release(row)
        self._full = False

    def forget(self, session: str) -> None:
        """Free the last, unshared block of a session; its whole blocks go when room is needed."""
        self._cache.pool.forget(session)

    def iterate(self, waiting: deque[Request]) -> None:
        """Take requests from `waiting` while there is room; decode once when no prompt is left to compute."""
        rows = self.rows
        if self._stale:
            for row in self._by_arrival()[::-1]:
                self._suspend(row, waiting)
            self._cache.clear()
            self._stale = False
        more = bool(waiting) and not self._full and self._admit(waiting)
        active = rows.active_rows()
        lag = rows.length[active] - rows.cached[active]
        if lag.max(initial=0) <= 1:
            self._pass(self._grown(active, waiting), [])
            return
        behind = lag > 1
        if more or lag[behind].sum() > self._prefill_tokens:  # commands first, then the next prompts
            decoding = _NO_ROWS
        else:
            decoding = self._grown(active[~behind], waiting)
        computing = active[behind]
        self._pass(decoding, self._spans(computing[rows.active[computing]]))

    def _by_arrival(self) -> list[int]:
        rows = self.rows
        return sorted(rows.active_rows().tolist(), key=lambda row: rows.of(row).arrival)

    def _admit(self, waiting: deque[Request]) -> bool:
        """Give rows to waiting requests; whether more of them could have one after this pass."""
        rows, cache = self.rows, self._cache
        computing = [row for row in rows.active_rows().tolist() if rows.length[row] - rows.cached[row] > 1]
        budget = self._prefill_tokens - int((rows.length - rows.cached)[computing].sum())
        held_back: list[Request] = []
        running = int(rows.active.sum())
        while waiting and budget > 0:
            request = waiting[0]
            row = rows.free_row()
            if row is None or running + len(held_back) == rows.count:
                break
            if len(request.prompt) + request.max_tokens - 1 > cache.tokens:
                self._refuse(waiting.popleft())
                continue
            tokens = request.token_ids
            if self._soon_known(tokens, computing):
                held_back.append(waiting.popleft())
                continue
            # a block in reserve for each, else the first that grows puts the last one out again
            found = cache.admit(row, tokens, request.session, reserve=running)
            if found is None:
                self._full = True  # until a row is released
                break
            waiting.popleft()
            running += 1
            rows.start(request, row)
            rows.cached[row] = found.cached
            self.counters.reused += found.cached
            self.counters.copied += found.copied
            if len(tokens) - found.cached > 1:
                computing.append(row)
                budget -= len(tokens) - found.cached
        waiting.extendleft(reversed(held_back))
        return bool(held_back) or (bool(waiting) and budget <= 0 and rows.free_row() is not None)

    def _soon_known(self, tokens: Int32Array, computing: list[int]) -> bool:
        """Whether a row in `computing` shares a block more with `tokens` than the cache knows now."""
        if not computing:
            return False
        n = min(len(tokens) - 1, int(self.rows.length[computing].max()))
        same = self.rows.tokens[computing, :n] == tokens[:n]
        common = np.where(same.all(1), n, same.argmin(1))
        common = int(np.minimum(common, self.rows.length[computing]).max())
        return common >= BLOCK and common >= self._cache.common(tokens[:-1]) + BLOCK

    def _refuse(self, request: Request) -> None:
        needed = len(request.prompt) + request.max_tokens - 1
        self._refused(
            request,
            EngineError(
                f"session {request.session!r}: {len(request.prompt)} prompt tokens and max_tokens "
                f"{request.max_tokens} need a cache of {needed} tokens; cache_bytes gives room for "
                f"{self._cache.tokens}; raise cache_bytes or ask for fewer tokens"
            ),
        )

    def _spans(self, rows: Int64Array) -> list[Span]:
        """The next tokens of these rows' prompts, the earliest request's first; one pass's worth.

        Only a prompt that is too long for a pass is cut.
        """
        budget = self._prefill_tokens
        spans: list[Span] = []
        for row in sorted(rows.tolist(), key=lambda row: self.rows.of(row).arrival):
            start, end = int(self.rows.cached[row]), int(self.rows.length[row])
            if end - start > budget and (spans and end - start <= self._prefill_tokens):
                break
            spans.append(Span(row, start, min(end, start + budget)))
            budget -= end - start
            if budget <= 0:
                break
        return spans

    def _grown(self, rows: Int64Array, waiting: deque[Request]) -> Int64Array:
        """These rows with a block for their next token, without those that had to make room."""
        short = self._cache.short(rows, self.rows.cached[rows])
        if not short:
            return rows
        for row in sorted(short, key=lambda row: self.rows.of(row).arrival):
            while self.rows.active[row] and not self._cache.grow(row):
                self._suspend(self._by_arrival()[-1], waiting)
                self.counters.preempted += 1
        return rows[self.rows.active[rows]]

    def _suspend(self, row: int, waiting: deque[Request]) -> None:
        """Take a request's row away; it keeps what it sampled, and waits before all others."""
        request, drawn = self.rows.of(row), self.rows.drawn(row)
        self.release(row, keep=True)
        request.drawn = drawn
        waiting.appendleft(request)

    def _publish(self, row: int) -> None:
        rows = self.rows
        self._cache.publish(row, rows.tokens[row, : rows.cached[row]], rows.of(row).session)

    def _pass(self, rows: Int64Array, spans: list[Span]) -> None:
        """Run the model once: decode `rows`, compute `spans`, sample for each row that is complete."""
        if not len(rows) and not spans:
            return
        started = time.perf_counter()
        table, model, counters = self.rows, self._model, self.counters
        attend = self._attention.plan(rows, table.cached[rows], spans)
        tokens = torch.from_numpy(table.tokens[attend.row, attend.position]).to(model.device)
        hidden = model.hidden(tokens, torch.from_numpy(attend.position).to(model.device), attend)
        table.cached[rows] += 1
        prefilled = len(attend.row) - len(rows)
        complete = rows
        if spans:
            ends = len(rows) - 1 + np.cumsum([s.end - s.start for s in spans])
            for span in spans:
                table.cached[span.row] = span.end
                self._publish(span.row)
            done = np.array([s.end == table.length[s.row] for s in spans])
            last = np.concatenate([np.arange(len(rows)), ends[done]])
            hidden = hidden.index_select(0, torch.from_numpy(last).to(model.device))
            complete = np.concatenate([rows, np.array([s.row for s in spans], np.int64)[done]])
        counters.prefilled += prefilled
        counters.decodes += bool(len(rows))
        counters.decode_rows += len(rows)
        counters.evicted, self._cache.pool.evicted = counters.evicted + self._cache.pool.evicted, 0
        if len(complete):
            self._sampled(complete, *draw(model.logits(hidden), table.sampling(complete), self._kernel))
        seconds = time.perf_counter() - started
        counters.prefill_s += seconds * prefilled / len(attend.row)
        counters.decode_s += seconds * len(rows) / len(attend.row)
