"""Rows: the running requests' tokens and settings, one row of every array per request.

Knows nothing of keys, values or states: what a model remembers of a row belongs to the stepper.
Used by the engine's thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from uni_agent.engines.local.request import NOTHING_DRAWN, Drawn, Request
from uni_agent.engines.local.sampling import Bias, RowSampling, mix
from uni_agent.types import Float32Array, Int32Array

Int64Array = npt.NDArray[np.int64]

_STOP_COLUMNS = 8


class Rows:
    """`count` rows of up to `context` tokens.

    `length[r]` counts the tokens of row r, `prompt[r]` those that were given, `limit[r]` is where
    it ends at the latest. `cached[r]` counts the leading tokens that the model has computed under the
    current weights; the stepper keeps it. A row is active from `start` to `release`.
    """

    def __init__(self, count: int, context: int) -> None:
        self.count, self.context = count, context
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
        self.active = np.zeros(count, np.bool_)
        self.request: list[Request | None] = [None] * count
        self.bias: dict[int, Bias] = {}
        """Only of rows that have one."""
        self.matching: set[int] = set()
        """Rows whose request looks for stop strings."""

    def active_rows(self) -> Int64Array:
        """Rows with a running request, ascending."""
        return np.flatnonzero(self.active)

    def free_row(self) -> int | None:
        """The lowest row without a request; None when all run."""
        row = int(self.active.argmin())
        return None if self.active[row] else row

    def of(self, row: int) -> Request:
        """The request that runs in a row."""
        request = self.request[row]
        assert request is not None
        return request

    def sampling(self, rows: Int64Array) -> RowSampling:
        """The settings of these rows for their next token."""
        biases: tuple[tuple[int, Bias], ...] = ()
        if self.bias:
            biases = tuple((i, self.bias[row]) for i, row in enumerate(rows.tolist()) if row in self.bias)
        return RowSampling(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.noise[rows],
            self.length[rows] - self.prompt[rows],
            biases,
        )

    def start(self, request: Request, row: int) -> None:
        """Make `row` the request's, with what it had sampled when it lost an earlier row."""
        sampling, drawn = request.sampling, request.drawn
        n = len(request.prompt)
        end = n + len(drawn.token_ids)
        self.tokens[row, :n] = request.prompt
        self.tokens[row, n:end] = drawn.token_ids
        self.logprobs[row, n:end] = drawn.logprobs
        self.versions[row, n:end] = drawn.versions
        self.length[row], self.prompt[row] = end, n
        self.limit[row] = n + request.max_tokens
        self.cached[row] = 0
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.noise[row] = mix(np.array([request.seed & 0xFFFFFFFFFFFFFFFF], np.uint64))[0]
        self._set_stops(row, sampling.stop_token_ids)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias[row] = Bias(np.array(ids, np.int64), np.array(values, np.float32))
        if request.matcher is not None:
            self.matching.add(row)
        self.active[row] = True
        self.request[row] = request
        request.row, request.drawn = row, NOTHING_DRAWN

    def drawn(self, row: int, start: int = 0) -> Drawn:
        """A copy of what the row's request has sampled, from its `start`-th token on."""
        part = slice(int(self.prompt[row]) + start, int(self.length[row]))
        return Drawn(
            self.tokens[row, part].copy(), self.logprobs[row, part].copy(), self.versions[row, part].copy()
        )

    def append(self, rows: Int64Array, ids: Int32Array, logprobs: Float32Array, version: int) -> None:
        """Write down one sampled token per row."""
        at = self.length[rows]
        self.tokens[rows, at] = ids
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.length[rows] = at + 1

    def release(self, row: int) -> Request:
        """Free the row of a request that is over, or that has to wait again; returns the request."""
        request = self.of(row)
        request.row = -1
        self.active[row] = False
        self.request[row] = None
        self.bias.pop(row, None)
        self.matching.discard(row)
        return request

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        if len(stops) > self.stop_ids.shape[1]:
            more = np.full((self.count, len(stops) - self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], 1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stops)] = stops
