"""One iteration's work for models that keep their own state: admit, compute prompts, step all rows.

In: waiting requests. Out: sampled tokens, handed to `sampled`. A running row's state is a row of a
batch; batches stay as they are while their rows run, and are put together anew when rows come and go.
What a session's turn left behind is kept, within the budget, for a prompt that extends exactly it.
Knows nothing of threads, event loops or answers.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from uni_agent.engines.local.request import Request
from uni_agent.engines.local.rows import Int64Array, Rows
from uni_agent.engines.local.sampling import draw
from uni_agent.engines.local.state_model import StateModel
from uni_agent.engines.local.states import States, gather
from uni_agent.engines.local.stepper import Counters, Refused, Sampled
from uni_agent.errors import EngineError
from uni_agent.types import Int32Array

_GONE = -1


@dataclass(slots=True)
class _Batch:
    """Rows whose states lie in one cache; _GONE where a request has ended."""

    rows: list[int]
    states: States


@dataclass(frozen=True, slots=True)
class _Kept:
    """The state that a session's last turn left, after exactly these tokens."""

    session: str
    tokens: Int32Array
    states: States


class StateStepper:
    """Runs a StateModel; satisfies `stepper.Stepper`.

    The states of running requests at their full length and those that are kept take `cache_bytes` at
    most: kept ones go first, the longest unused first, then requests wait. Rows of different length
    step together where the model allows it, else those of equal length do. `batch_invariant` computes
    each row alone and from its first token, so that its bits depend on nothing else.
    """

    def __init__(
        self,
        model: StateModel,
        rows: Rows,
        *,
        cache_bytes: int,
        prefill_tokens: int,
        batch_invariant: bool,
        sampled: Sampled,
        refused: Refused,
    ) -> None:
        self.rows, self.counters = rows, Counters()
        self._model, self._cache_bytes, self._prefill_tokens = model, cache_bytes, prefill_tokens
        self._sampled, self._refused = sampled, refused
        self._alone = batch_invariant
        self._in_parts = model.continues and not batch_invariant
        self._batches: list[_Batch] = []
        self._kept: list[_Kept] = []
        """The one used last stands last."""
        self._stale = False

    @property
    def module(self) -> nn.Module:
        """The module that the model's weights are read from."""
        return self._model.module

    @property
    def used(self) -> float:
        """The fraction of the budget that running requests may take and kept states do take."""
        return min(1.0, (self._reserved() + self._kept_bytes()) / self._cache_bytes)

    def refresh(self) -> None:
        """Take the module's parameters as they are now."""
        self._model.refresh()

    def invalidate(self) -> None:
        """Drop all states before the next iteration; running requests start over from their tokens."""
        self._stale = True

    def release(self, row: int, *, keep: bool) -> None:
        """Free a row; `keep` its state for the session's next turn, or forget it."""
        request = self.rows.of(row)
        tokens = self.rows.tokens[row, : self.rows.cached[row]].copy()
        self.rows.release(row)
        for batch in self._batches:
            if row in batch.rows:
                at = batch.rows.index(row)
                if keep and not self._stale and not self._alone:
                    self._kept.append(_Kept(request.session, tokens, gather([(batch.states, [at])])))
                batch.rows[at] = _GONE
        self._batches = [batch for batch in self._batches if any(r != _GONE for r in batch.rows)]
        self._evict(self._cache_bytes - self._reserved())

    def forget(self, session: str) -> None:
        """Drop what is kept for a session."""
        self._kept = [kept for kept in self._kept if kept.session != session]

    def iterate(self, waiting: deque[Request]) -> None:
        """Take requests from `waiting` while there is room; step once when no prompt is left to compute."""
        if self._stale:
            self._batches, self._kept, self._stale = [], [], False
            self.rows.cached[:] = 0
        self._admit(waiting)
        rows = self.rows
        active = rows.active_rows()
        order = sorted(active.tolist(), key=lambda row: rows.of(row).arrival)
        new = [row for row in order if rows.cached[row] == 0]
        behind = [row for row in order if rows.length[row] - rows.cached[row] > 1]
        if new:
            self._start(new)
        elif behind and self._in_parts:
            self._catch_up(behind)
        elif order:
            self._step(order)

    # --- memory ---

    def _admit(self, waiting: deque[Request]) -> None:
        rows = self.rows
        while waiting:
            request = waiting[0]
            row = rows.free_row()
            if row is None:
                return
            if self._model.bytes_of(len(request.prompt) + request.max_tokens - 1) > self._cache_bytes:
                self._refuse(waiting.popleft())
                continue
            rows.start(request, row)
            if self._reserved() > self._cache_bytes:
                request.drawn = rows.drawn(row)
                rows.release(row)
                return
            waiting.popleft()
            found = self._find(request)
            if found is not None:
                self._batches.append(_Batch([row], gather([(found.states, [0])])))
                rows.cached[row] = len(found.tokens)
                self.counters.reused += len(found.tokens)
                if found.session == request.session:
                    self._kept = [kept for kept in self._kept if kept is not found]
            self._evict(self._cache_bytes - self._reserved())

    def _reserved(self) -> int:
        """What the running requests' states take in the end; a batch is as long as its longest row."""
        active = self.rows.active_rows()
        if not len(active):
            return 0
        longest = int(self.rows.limit[active].max()) if self._model.ragged and not self._alone else None
        return sum(self._model.bytes_of(longest or int(self.rows.limit[row])) for row in active.tolist())

    def _kept_bytes(self) -> int:
        return sum(kept.states.num_bytes for kept in self._kept)

    def _evict(self, room: int) -> None:
        while self._kept and self._kept_bytes() > room:
            self._kept.pop(0)
            self.counters.evicted += 1

    def _find(self, request: Request) -> _Kept | None:
        """The kept state that saves most: of tokens that the request's begin with, its session's first.

        Where a state takes one token at a time, a longer rest is computed anew as a whole.
        """
        tokens = request.token_ids
        fits = [
            kept
            for kept in self._kept
            if len(kept.tokens) < len(tokens)
            and (self._model.continues or len(tokens) <= 2 * len(kept.tokens))
            and np.array_equal(kept.tokens, tokens[: len(kept.tokens)])
        ]
        return max(fits, key=lambda k: (len(k.tokens), k.session == request.session), default=None)

    def _refuse(self, request: Request) -> None:
        tokens = len(request.prompt) + request.max_tokens - 1
        self._refused(
            request,
            EngineError(
                f"session {request.session!r}: the state of {tokens} tokens takes "
                f"{self._model.bytes_of(tokens)} bytes, and cache_bytes is {self._cache_bytes}; raise "
                "cache_bytes or ask for fewer tokens"
            ),
        )

    # --- passes ---

    def _start(self, new: list[int]) -> None:
        """Compute prompts of one length, each distinct one once; the earliest request's is among them."""
        rows = self.rows
        length = self._part(int(rows.length[new[0]]))
        prompts: dict[bytes, list[int]] = {}
        for row in new:
            if self._part(int(rows.length[row])) == length:
                key = rows.tokens[row, :length].tobytes()
                most = length if self._alone else max(length, self._prefill_tokens)
                if key in prompts or (len(prompts) + 1) * length <= most:
                    prompts.setdefault(key, []).append(row)
        started = time.perf_counter()
        first = np.array([members[0] for members in prompts.values()])
        hidden, states = self._model.start(self._tensor(rows.tokens[first, :length]))
        members = [row for same in prompts.values() for row in same]
        origin = [i for i, same in enumerate(prompts.values()) for _ in same]
        if len(members) > len(first):
            states = gather([(states, origin)])
            hidden = hidden[origin]
        self._batches.append(_Batch(members, states))
        rows.cached[members] = length
        self.counters.prefilled += length * len(first)
        self.counters.copied += length * (len(members) - len(first))
        self._sample(members, hidden)
        self.counters.prefill_s += time.perf_counter() - started

    def _part(self, tokens: int) -> int:
        """How many tokens of a prompt come first: all, unless the model can go on from a part."""
        return min(tokens, self._prefill_tokens) if self._in_parts else tokens

    def _catch_up(self, behind: list[int]) -> None:
        """Feed rows what they lack, several tokens at once: those that lack as many as the earliest."""
        started = time.perf_counter()
        rows = self.rows
        lag = rows.length - rows.cached
        count = self._part(int(lag[behind[0]]))
        most = max(1, self._prefill_tokens // count)
        same = [
            row for row in behind if self._part(int(lag[row])) == count and self._together(row, behind[0])
        ]
        self._advance(self._batch_of(same[:most]), count)
        self.counters.prefilled += count * len(same[:most])
        self.counters.prefill_s += time.perf_counter() - started

    def _step(self, order: list[int]) -> None:
        """One token for each row: the last one sampled, or the next of those that it lacks."""
        started = time.perf_counter()
        behind = int((self.rows.length - self.rows.cached > 1)[order].sum())
        self.counters.prefilled += behind
        self.counters.decodes += 1
        self.counters.decode_rows += len(order) - behind
        left = order
        while left:
            group = [row for row in left if self._together(row, left[0])]
            left = [row for row in left if not self._together(row, left[0])]
            self._advance(self._batch_of(group), 1)
        self.counters.decode_s += time.perf_counter() - started

    def _together(self, row: int, other: int) -> bool:
        if self._alone:
            return row == other
        return self._model.ragged or self.rows.cached[row] == self.rows.cached[other]

    def _batch_of(self, group: list[int]) -> _Batch:
        """The batch of exactly these rows, put together if it is not there."""
        wanted = set(group)
        parts: list[tuple[States, list[int]]] = []
        rows: list[int] = []
        others: list[_Batch] = []
        for batch in self._batches:
            inside = [i for i, row in enumerate(batch.rows) if row in wanted]
            outside = [i for i, row in enumerate(batch.rows) if row not in wanted and row != _GONE]
            if len(inside) == len(batch.rows) == len(group):
                return batch
            if not inside:
                others.append(batch)
                continue
            parts.append((batch.states, inside))
            rows += [batch.rows[i] for i in inside]
            if outside:
                others.append(_Batch([batch.rows[i] for i in outside], gather([(batch.states, outside)])))
        joined = _Batch(rows, gather(parts))
        self._batches = [*others, joined]
        return joined

    def _advance(self, batch: _Batch, count: int) -> None:
        table, rows = self.rows, np.array(batch.rows)
        places = table.cached[rows][:, None] + np.arange(count)
        hidden = self._model.advance(self._tensor(table.tokens[rows[:, None], places]), batch.states)
        table.cached[rows] += count
        self._sample(list(batch.rows), hidden)

    def _sample(self, members: list[int], hidden: Tensor) -> None:
        """Draw a token for the rows whose tokens are all computed; hidden [len(members), H]."""
        rows: Int64Array = np.array(members, np.int64)
        complete = self.rows.cached[rows] == self.rows.length[rows]
        if not complete.any():
            return
        if not complete.all():
            hidden = hidden[torch.from_numpy(np.flatnonzero(complete)).to(hidden.device)]
        rows = rows[complete]
        self._sampled(rows, *draw(self._model.logits(hidden), self.rows.sampling(rows)))

    def _tensor(self, tokens: Int32Array) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64)).to(self._model.device)
