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

from uni_agent.engines.local_attention import DecodeAttention, PrefillAttention, Span
from uni_agent.engines.local_decoder import Decoder
from uni_agent.engines.local_request import Request
from uni_agent.engines.local_sampling import draw
from uni_agent.engines.local_slots import Int64Array, Placement, Slots
from uni_agent.errors import EngineError
from uni_agent.types import Float32Array, Int32Array

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
        slots, started = self._slots, time.perf_counter()
        if self._stale:
            self._stale = False
            self._refill()
        more = bool(waiting) and self._admit(waiting)
        now = time.perf_counter()
        self.counters.prefill_s += now - started
        if more:
            return  # this iteration's budget is used up: commands first, then the next prompts
        slots.compact()
        rows = slots.active_rows()
        if len(rows):
            self._decode(rows)
            self.counters.decode_s += time.perf_counter() - now

    def _admit(self, waiting: deque[Request]) -> bool:
        """Place waiting requests and compute their prompts; True when more could be placed at once."""
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
        self._compute(placed)
        return bool(waiting) and budget <= 0 and int(slots.active.sum()) < self._max_running

    def _refill(self) -> None:
        """Recompute the running requests' caches, shared prefixes once."""
        slots = self._slots
        placed: list[Placement] = []
        waves: dict[int, int] = {}
        for row in slots.active_rows().tolist():
            tokens = slots.tokens[row, : slots.length[row]]
            self._note(slots.find_prefix(row, tokens, int(slots.cached[row]), waves), placed, waves)
        self._compute(placed)

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

    def _compute(self, placed: list[Placement]) -> None:
        """Prefill wave by wave; a row that lacks one token only joins the next decode instead."""
        slots = self._slots
        for wave in range(1 + max((p.wave for p in placed), default=-1)):
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
            for part in _parts(spans, self._prefill_tokens):
                self._prefill(part)

    def _prefill(self, spans: list[Span]) -> None:
        slots, decoder = self._slots, self._decoder
        tokens = np.concatenate([slots.tokens[s.row, s.start : s.end] for s in spans])
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        last = np.cumsum([s.end - s.start for s in spans]) - 1
        hidden = decoder.hidden(
            torch.from_numpy(tokens).to(decoder.device),
            torch.from_numpy(positions).to(decoder.device),
            PrefillAttention(slots, spans),
        )
        logits = decoder.logits(hidden[torch.from_numpy(last).to(decoder.device)])
        rows = np.array([s.row for s in spans])
        slots.cached[rows] = [s.end for s in spans]
        self.counters.prefilled += len(tokens)
        self._sampled(rows, *draw(logits, slots.sampling(rows)))

    def _decode(self, rows: Int64Array) -> None:
        slots, decoder = self._slots, self._decoder
        positions = slots.cached[rows]
        tokens = slots.tokens[rows, positions]
        hidden = decoder.hidden(
            torch.from_numpy(tokens).to(decoder.device),
            torch.from_numpy(positions).to(decoder.device),
            DecodeAttention(slots, rows),
        )
        logits = decoder.logits(hidden)
        slots.cached[rows] = positions + 1
        self.counters.decodes += 1
        self.counters.decode_rows += len(rows)
        self._sampled(rows, *draw(logits, slots.sampling(rows)))


def _parts(spans: list[Span], tokens: int) -> list[list[Span]]:
    """Cut a list of spans where it exceeds `tokens`; a longer span stays whole."""
    parts: list[list[Span]] = []
    size = tokens
    for span in spans:
        n = span.end - span.start
        if size + n > tokens:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += n
    return parts
