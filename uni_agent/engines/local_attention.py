"""Attention over the slots' cache: one token for each of some rows (decode), many of others (prefill).

Both kinds go through the model in one pass. New keys and values are written first, then each token
attends to its row's. Used by the engine's thread only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uni_agent.engines.local_slots import Int64Array, Slots
from uni_agent.models.attention import similar_sizes

# Bytes of a cache that are read in the time that one more call of attention costs.
_CALL_BYTES_CPU = 1 << 17
_CALL_BYTES_GPU = 1 << 25


class Span(NamedTuple):
    """Tokens [start, end) of a row that a prefill computes."""

    row: int
    start: int
    end: int


class _Run(NamedTuple):
    """Decoding tokens [begin, end) of the pass: their rows follow one another from `row` on."""

    begin: int
    end: int
    row: int
    mask: Tensor  # [end - begin, 1, 1, reach]


class _Batch(NamedTuple):
    """Spans padded to one size: `queries` int64[count * length] are places in the pass."""

    queries: Tensor
    rows: Tensor
    reach: int
    mask: Tensor | None  # [count * kv_heads or 1, 1, length, reach]; None: causal from the first token on


class StepAttention:
    """Attention of one pass: a token for each of `rows` (ascending), then the tokens of `spans`.

    row and position int64[N] say where each token of the pass stands.
    """

    def __init__(self, slots: Slots, rows: Int64Array, spans: list[Span]) -> None:
        self._slots = slots
        sizes = np.array([s.end - s.start for s in spans], np.int64)
        self.row = np.concatenate([rows, np.repeat(np.array([s.row for s in spans], np.int64), sizes)])
        self.position = np.concatenate([slots.cached[rows], *[np.arange(s.start, s.end) for s in spans]])
        heads = self.row[:, None] * slots.geometry.kv_heads + np.arange(slots.geometry.kv_heads)
        self._index = self._tensor((heads * slots.capacity + self.position[:, None]).reshape(-1))
        self._runs = self._plan_runs(rows)
        self._batches, self._restore = self._plan_batches(spans, sizes, len(rows))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self._slots
        slots.flat_keys[layer].index_copy_(0, self._index, k.reshape(-1, k.shape[-1]))
        slots.flat_values[layer].index_copy_(0, self._index, v.reshape(-1, v.shape[-1]))
        keys, values = slots.keys[layer], slots.values[layer]
        parts = [_decode(run, q, keys, values) for run in self._runs]
        parts += [_prefill(batch, q, keys, values) for batch in self._batches]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._restore is None else out.index_select(0, self._restore)

    def _plan_runs(self, rows: Int64Array) -> list[_Run]:
        """Neighbouring rows attend together unless padding to the longest costs more than a call."""
        g, cache = self._slots.geometry, self._slots.cache
        call_bytes = _CALL_BYTES_CPU if cache.device.type == "cpu" else _CALL_BYTES_GPU
        call_tokens = call_bytes / (2 * g.kv_heads * g.head_dim * cache.itemsize)
        reach = self._slots.cached[rows] + 1
        hidden = np.arange(reach.max(initial=0)) >= reach[:, None]
        masks = self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(cache.dtype)
        runs: list[_Run] = []
        begin = longest = 0
        row_list, reach_list = rows.tolist(), reach.tolist()
        for i in range(len(row_list) + 1):
            if i < len(row_list):
                longer = max(longest, reach_list[i])
                padding = (longer - longest) * (i - begin) + longer - reach_list[i]
                if i == begin or (row_list[i] == row_list[i - 1] + 1 and padding <= call_tokens):
                    longest = longer
                    continue
            if i > begin:
                runs.append(_Run(begin, i, row_list[begin], masks[begin:i, None, None, :longest]))
                begin, longest = i, reach_list[i] if i < len(row_list) else 0
        return runs

    def _plan_batches(
        self, spans: list[Span], sizes: Int64Array, offset: int
    ) -> tuple[list[_Batch], Tensor | None]:
        """Spans of similar size attend together; `offset` decoding tokens stand before them."""
        if not spans:
            return [], None
        kv_heads, dtype = self._slots.geometry.kv_heads, self._slots.cache.dtype
        starts, ends = (np.array(column, np.int64) for column in zip(*[s[1:] for s in spans], strict=True))
        first = offset + np.cumsum(sizes) - sizes
        restore = np.arange(offset + int(sizes.sum()))
        batches: list[_Batch] = []
        slot = offset
        for members in similar_sizes(sizes, ends, starts):
            length, reach = int(sizes[members].max()), int(ends[members].max())
            within = np.arange(length)
            queries = first[members, None] + np.minimum(within, sizes[members, None] - 1)
            real = within < sizes[members, None]
            places = slot + np.arange(len(members) * length).reshape(len(members), length)
            restore[queries[real]] = places[real]
            slot += len(members) * length
            mask = None
            if starts[members].any():
                hidden = np.arange(reach) > (starts[members, None] + within)[:, :, None]
                mask = self._tensor(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)[:, None]
                if len(members) > 1:
                    mask = mask.repeat_interleave(kv_heads, 0)
            rows = np.array([spans[i].row for i in members.tolist()])
            batches.append(_Batch(self._tensor(queries.reshape(-1)), self._tensor(rows), reach, mask))
        return batches, self._tensor(restore)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._slots.cache.device)


def _decode(run: _Run, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    count, reach = run.end - run.begin, run.mask.shape[-1]
    rows = slice(run.row, run.row + count)
    # the heads of a group become query positions of their one key head: much faster than enable_gqa
    query = q[run.begin : run.end].reshape(count, keys.shape[1], -1, q.shape[-1])
    out = F.scaled_dot_product_attention(query, keys[rows, :, :reach], values[rows, :, :reach], run.mask)
    return out.reshape(count, *q.shape[1:])


def _prefill(batch: _Batch, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    count, kv_heads = len(batch.rows), keys.shape[1]
    query = q.index_select(0, batch.queries).view(count, -1, kv_heads, q.shape[1] // kv_heads, q.shape[-1])
    query = query.permute(0, 2, 3, 1, 4).flatten(0, 1)  # [count * kv_heads, group, length, D]

    def seen(cache: Tensor) -> Tensor:
        picked = cache[:, :, : batch.reach].index_select(0, batch.rows).flatten(0, 1)
        return picked[:, None].expand(-1, query.shape[1], -1, -1)

    out = F.scaled_dot_product_attention(
        query, seen(keys), seen(values), batch.mask, is_causal=batch.mask is None
    )
    return out.view(count, kv_heads, *out.shape[1:]).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:])
