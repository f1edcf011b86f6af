"""One iteration's work: place requests, compute their prompts, decode a token for each.

In: waiting requests and the slots. Out: sampled tokens, handed to `sampled`. Knows the model and
the cache, and nothing of threads, event loops or answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from uni_agent.engines.local_attention import Span, StepAttention
from uni_agent.engines.local_decoder import Decoder
from uni_agent.engines.local_request import Request
from uni_agent.engines.local_sampling import draw
from uni_agent.engines.local_slots import Int64Array, Placement, Slots
from uni_agent.errors import EngineError
from uni_agent.types import Float32Array, Int32Array

_NO_ROWS: Int64Array = np.zeros(0, np.int64)

Sampled = Callable[[Int64Array, Int32Array, Float32Array], None]
Refused = Callable[[Request, EngineError], None]


@dataclass(slots=True)
class Counters:
    """What happened since the last look; see `LocalEngine.stats`."""

    sampled: int = 0
    prefilled: int = 0
    reused: int = 0
    copied: int = 0
    finished: int = 0
    decodes: int = 0
    decode_rows: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Stepper:
    """Runs the model for the requests in `slots`, at most `max_running` at a time.

    New prompts go before decoding, about `prefill_tokens` of them an iteration. What is sampled is
    handed to `sampled(rows, ids, logprobs)`, which writes it down and may end requests; a request that
    cannot be placed goes to `refused`.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: Slots,
        *,
        max_running: int,
        prefill_tokens: int,
        sampled: Sampled,
        refused: Refused,
    ) -> None:
        self.counters = Counters()
        self._decoder, self._slots = decoder, slots
        self._max_running, self._prefill_tokens = max_running, prefill_tokens
        self._sampled, self._refused = sampled, refused
        self._stale = False

    def invalidate(self) -> None:
        """Drop all caches; what runs is computed again from its tokens before it goes on."""
        self._slots.invalidate()
        self._stale = True

    def iterate(self, waiting: deque[Request]) -> None:
        """Take requests from `waiting` while there is room; decode once when none is left to take."""
        self._slots.compact()
        if self._stale:
            self._stale = False
            self._pass(_NO_ROWS, self._refill())
        spans, more = self._admit(waiting) if waiting else ([], False)
        if more:  # the budget is used up: commands first, then the next prompts
            self._pass(_NO_ROWS, spans)
        else:
            rows = self._slots.active_rows()
            self._pass(rows[~np.isin(rows, [s.row for s in spans])], spans)

    def _admit(self, waiting: deque[Request]) -> tuple[list[Span], bool]:
        """Place waiting requests and compute what others need; returns the prompts that are left to
        compute, and whether more requests could be placed at once.
        """
        slots, budget = self._slots, self._prefill_tokens
        placed: list[Placement] = []
        waves: dict[int, int] = {}
        room = self._max_running - int(slots.active.sum())
        while waiting and budget > 0 and len(placed) < room:
            request = waiting[0]
            placement = slots.place(request, waves)
            if placement is None:
                break
            try:
                slots.start(request, placement.row, placement.shared if placement.source is None else 0)
            except EngineError as error:
                self._refused(waiting.popleft(), error)
                continue
            waiting.popleft()
            budget -= len(request.prompt) - placement.shared
            self._note(placement, placed, waves)
        spans = self._compute(placed)
        return spans, bool(waiting) and budget <= 0 and int(slots.active.sum()) < self._max_running

    def _refill(self) -> list[Span]:
        """Recompute the running requests' caches, shared prefixes once; returns what is left to compute."""
        slots = self._slots
        placed: list[Placement] = []
        waves: dict[int, int] = {}
        for row in slots.active_rows().tolist():
            tokens = slots.tokens[row, : slots.length[row]]
            self._note(slots.find_prefix(row, tokens, int(slots.cached[row]), waves), placed, waves)
        return self._compute(placed)

    def _note(self, placement: Placement, placed: list[Placement], waves: dict[int, int]) -> None:
        row, shared, source, wave = placement
        if source is None:
            self.counters.reused += shared
        else:
            self.counters.copied += shared
            if wave == 0:  # at once: a later placement may take the source's slot
                self._slots.copy_prefix(source, row, shared)
                self._slots.cached[row] = shared
        placed.append(placement)
        if self._slots.length[row] - shared > 1:  # else its last token is computed by the decode only
            waves[row] = wave

    def _compute(self, placed: list[Placement]) -> list[Span]:
        """Prefill wave by wave, but for the last part, which is returned: a decode can go with it.

        A row that lacks one token only is in no part; it joins the next decode instead.
        """
        slots = self._slots
        left: list[Span] = []
        for wave in range(1 + max((p.wave for p in placed), default=-1)):
            if left:
                self._pass(_NO_ROWS, left)
            spans: list[Span] = []
            for row, shared, source, own_wave in placed:
                if own_wave != wave:
                    continue
                if wave and source is not None:
                    slots.copy_prefix(source, row, shared)
                    slots.cached[row] = shared
                end = int(slots.length[row])
                if end - shared > 1:
                    spans.append(Span(row, shared, end))
            *parts, left = _parts(spans, self._prefill_tokens)
            for part in parts:
                self._pass(_NO_ROWS, part)
        return left

    def _pass(self, rows: Int64Array, spans: list[Span]) -> None:
        """Run the model once: decode `rows`, prefill `spans`, and sample a token for each of them."""
        if not len(rows) and not spans:
            return
        started = time.perf_counter()
        slots, decoder, counters = self._slots, self._decoder, self.counters
        attend = StepAttention(slots, rows, spans)
        hidden = decoder.hidden(
            torch.from_numpy(slots.tokens[attend.row, attend.position]).to(decoder.device),
            torch.from_numpy(attend.position).to(decoder.device),
            attend,
        )
        prefilled = len(attend.row) - len(rows)
        if spans:
            ends = len(rows) - 1 + np.cumsum([s.end - s.start for s in spans])
            last = torch.from_numpy(np.concatenate([np.arange(len(rows)), ends])).to(decoder.device)
            hidden = hidden.index_select(0, last)
        slots.cached[rows] += 1
        sampled = np.concatenate([rows, np.array([s.row for s in spans], np.int64)])
        slots.cached[sampled[len(rows) :]] = [s.end for s in spans]
        counters.prefilled += prefilled
        counters.decodes += bool(len(rows))
        counters.decode_rows += len(rows)
        self._sampled(sampled, *draw(decoder.logits(hidden), slots.sampling(sampled)))
        seconds = time.perf_counter() - started
        counters.prefill_s += seconds * prefilled / len(attend.row)
        counters.decode_s += seconds * len(rows) / len(attend.row)


def _parts(spans: list[Span], tokens: int) -> list[list[Span]]:
    """Cut a list of spans where it exceeds `tokens`; a longer span stays whole. One part at least."""
    parts: list[list[Span]] = [[]]
    size = 0
    for span in spans:
        n = span.end - span.start
        if parts[-1] and size + n > tokens:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += n
    return parts
