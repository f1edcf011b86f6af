"""Slots: where a request's tokens and their keys and values live, also after the request ended.

A slot is a row of every array here and of the cache tensor. `cached[s]` counts the tokens of slot s
whose keys and values are valid; `length[s]` the tokens that it holds. A slot is active while a
request runs in it, and idle while it only remembers a session. Active slots are kept at low row
numbers, so that decoding attends over few contiguous views. Used by the engine's thread only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from uni_agent.engines.local_decoder import Geometry
from uni_agent.engines.local_request import Request
from uni_agent.engines.local_sampling import RowSampling, mix
from uni_agent.errors import EngineError
from uni_agent.types import Int32Array

Int64Array = npt.NDArray[np.int64]

MIN_COPY = 16
"""Tokens from which copying another slot's prefix beats computing it again."""

_STOP_COLUMNS = 8
_FIRST_CAPACITY = 512


class Placement(NamedTuple):
    """Which slot a request gets, and where the first `shared` tokens' keys and values come from.

    `source` is another slot to copy them from, or None when the slot has them already. A source
    that itself is not computed yet has a `wave` of its own; this one then comes a wave later.
    """

    row: int
    shared: int
    source: int | None
    wave: int


class Slots:
    """`count` slots of up to `context` tokens; the cache is float[layers, 2, count, Hk, capacity, D].

    `capacity` doubles when a request needs it, so a long context costs nothing until it is used.
    """

    def __init__(
        self, geometry: Geometry, *, count: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry, self.count, self.context = geometry, count, context
        self._dtype, self._device = dtype, device
        self.capacity = 0
        self._allocate(min(context, _FIRST_CAPACITY))
        self.tokens = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.versions = np.zeros((count, context), np.int32)
        self.length = np.zeros(count, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.prompt = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.noise = np.zeros(count, np.uint64)
        self.stop_ids = np.full((count, _STOP_COLUMNS), -1, np.int32)
        self.stamp = np.zeros(count, np.int64)
        self.active = np.zeros(count, np.bool_)
        self.request: list[Request | None] = [None] * count
        self.session: list[str | None] = [None] * count
        self._clock = 0

    def active_rows(self) -> Int64Array:
        """Rows with a running request, ascending."""
        return np.flatnonzero(self.active)

    def sampling(self, rows: Int64Array) -> RowSampling:
        """The settings of these rows for their next token."""
        return RowSampling(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.noise[rows],
            self.length[rows] - self.prompt[rows],
        )

    def place(self, request: Request, waves: dict[int, int]) -> Placement | None:
        """Choose a slot for a request; None when all are active.

        `waves` maps rows that were placed in this round but are not computed yet to their wave; they
        count as sources.
        """
        row = self._pick_row(request)
        if row is None:
            return None
        own = self._own_prefix(row, request.prompt)
        return self.find_prefix(row, request.prompt, own, waves)

    def find_prefix(self, row: int, tokens: Int32Array, own: int, waves: dict[int, int]) -> Placement:
        """The longest known prefix of `tokens` for `row`, whose slot already holds `own` of them."""
        known = self.cached.copy()
        for pending in waves:
            known[pending] = self.length[pending]
        shared = np.minimum(self._common(tokens), np.minimum(known, len(tokens) - 1))
        shared[row] = own
        best = int(shared.argmax())
        if shared[best] < own + MIN_COPY:
            return Placement(row, own, None, 0)
        # of equally good sources take one that is computed already
        ready = [s for s in np.flatnonzero(shared == shared[best]).tolist() if s not in waves]
        source = ready[0] if ready else best
        return Placement(row, int(shared[source]), source, waves[source] + 1 if source in waves else 0)

    def start(self, request: Request, row: int, cached: int) -> None:
        """Make `row` the request's, with its first `cached` tokens' keys and values valid.

        Raises EngineError when the memory for it is not there; nothing has changed then.
        """
        sampling = request.sampling
        n = len(request.prompt)
        limit = n + request.max_tokens
        if limit > self.capacity:
            self._allocate(min(self.context, max(2 * self.capacity, limit)))
        self.tokens[row, :n] = request.prompt
        self.length[row] = self.prompt[row] = n
        self.limit[row] = limit
        self.cached[row] = cached
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.noise[row] = mix(np.array([request.seed & 0xFFFFFFFFFFFFFFFF], np.uint64))[0]
        stops = sampling.stop_token_ids
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((self.count, len(stops) - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], 1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
        self.active[row] = True
        self.request[row], self.session[row] = request, request.session
        request.row = row

    def release(self, row: int, *, keep: bool) -> None:
        """The row's request is over; `keep` its tokens for the session, or forget them."""
        self._clock += 1
        self.stamp[row] = self._clock
        self.active[row] = False
        self.request[row] = None
        if not keep:
            self.session[row] = None
            self.cached[row] = 0

    def forget(self, session: str) -> None:
        """Drop the idle slots of a session."""
        for row, owner in enumerate(self.session):
            if owner == session and not self.active[row]:
                self.release(row, keep=False)

    def invalidate(self) -> None:
        """Drop every key and value: they were made by other weights."""
        self.cached[:] = 0
        for row in np.flatnonzero(~self.active).tolist():
            self.session[row] = None

    def copy_prefix(self, source: int, row: int, n: int) -> None:
        """Copy the keys and values of `source`'s first n tokens to `row`."""
        self.cache[:, :, row, :, :n] = self.cache[:, :, source, :, :n]

    def compact(self) -> None:
        """Move active slots down when they lie far apart: neighbours attend together."""
        rows = self.active_rows()
        n = len(rows)
        if n == 0 or rows[-1] + 1 <= 2 * n + 8:
            return
        holes = np.flatnonzero(~self.active[:n]).tolist()
        movers = rows[rows >= n].tolist()
        for hole, mover in zip(holes, reversed(movers), strict=True):
            self._swap(hole, mover)

    def _allocate(self, capacity: int) -> None:
        """Make the cache hold `capacity` tokens a slot; what it holds is kept."""
        g = self.geometry
        shape = (g.layers, 2, self.count, g.kv_heads, capacity, g.head_dim)
        # zeros, not empty: attention multiplies masked values by 0, and 0 * NaN is NaN
        try:
            cache = _zeros(shape, self._dtype, self._device)
        except (MemoryError, RuntimeError) as error:
            size = math.prod(shape) * self._dtype.itemsize
            raise EngineError(
                f"the cache for {self.count} slots of {capacity} tokens needs {size / 2**30:.1f} GiB, which "
                "this machine refuses; lower cache_slots, max_running, or the tokens of a request"
            ) from error
        if self.capacity:
            cache[..., : self.capacity, :] = self.cache
        self.cache, self.capacity = cache, capacity
        self.keys = [cache[i, 0] for i in range(g.layers)]
        self.values = [cache[i, 1] for i in range(g.layers)]
        self.flat_keys = [k.view(-1, g.head_dim) for k in self.keys]
        self.flat_values = [v.view(-1, g.head_dim) for v in self.values]

    def _pick_row(self, request: Request) -> int | None:
        """The session's own idle slot, else an unused one, else the one idle for longest."""
        idle = np.flatnonzero(~self.active).tolist()
        if not idle:
            return None
        mine = [r for r in idle if self.session[r] == request.session and self.cached[r]]
        if mine:
            return max(mine, key=lambda r: self._own_prefix(r, request.prompt))
        unused = [r for r in idle if self.cached[r] == 0]
        return unused[0] if unused else min(idle, key=lambda r: int(self.stamp[r]))

    def _own_prefix(self, row: int, tokens: Int32Array) -> int:
        n = min(int(self.cached[row]), len(tokens) - 1)
        differ = self.tokens[row, :n] != tokens[:n]
        return int(differ.argmax()) if differ.any() else n

    def _common(self, tokens: Int32Array) -> Int64Array:
        """int64[count]: how many leading tokens each slot's row shares with `tokens`."""
        n = len(tokens)
        differ = self.tokens[:, :n] != tokens
        return np.where(differ.any(1), differ.argmax(1), n)

    def _swap(self, a: int, b: int) -> None:
        in_a, in_b = int(self.cached[a]), int(self.cached[b])
        held = self.cache[:, :, a, :, :in_a].clone()
        self.cache[:, :, a, :, :in_b] = self.cache[:, :, b, :, :in_b]
        self.cache[:, :, b, :, :in_a] = held
        pair, flipped = [a, b], [b, a]
        for array in (self.tokens, self.logprobs, self.versions, self.stop_ids):
            array[pair] = array[flipped]
        for vector in (self.length, self.cached, self.prompt, self.limit, self.top_k, self.stamp):
            vector[pair] = vector[flipped]
        for vector in (self.temperature, self.top_p, self.noise, self.active):
            vector[pair] = vector[flipped]
        self.request[a], self.request[b] = self.request[b], self.request[a]
        self.session[a], self.session[b] = self.session[b], self.session[a]
        for row in pair:
            moved = self.request[row]
            if moved is not None:
                moved.row = row


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory is taken when it is first written; torch.zeros on a CPU writes all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    blank = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(blank).view(dtype).view(shape)
