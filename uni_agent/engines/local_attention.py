"""Attention over the slots' cache: one token per row (decode), or many tokens of some rows (prefill).

Both write the new keys and values first, then attend. Used by the engine's thread only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uni_agent.engines.local_slots import Int64Array, Slots


class DecodeAttention:
    """One new token per row, against the cached tokens of its slot."""

    def __init__(self, slots: Slots, rows: Int64Array) -> None:
        self._slots = slots
        g = slots.geometry
        positions = slots.cached[rows]
        device = slots.cache.device
        heads = np.arange(g.kv_heads)
        index = ((rows[:, None] * g.kv_heads + heads) * slots.capacity + positions[:, None]).reshape(-1)
        self._index = torch.from_numpy(index).to(device)
        n, self._view = len(rows), int(rows[-1]) + 1
        self._padded = torch.from_numpy(rows).to(device) if n < self._view else None
        last = positions
        if self._padded is not None:
            last = np.zeros(self._view, np.int64)  # idle rows see one token: their result is not used
            last[rows] = positions
        # a rounded length keeps the shapes, and what torch caches for them, the same for a while
        self._reach = min(slots.capacity, (int(positions.max()) + 32) // 32 * 32)
        hidden = np.where(np.arange(self._reach) > last[:, None], np.float32(-np.inf), np.float32(0))
        self._mask = torch.from_numpy(hidden).to(device, slots.cache.dtype)[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, g = self._slots, self._slots.geometry
        n, dim = q.shape[0], g.head_dim
        slots.flat_keys[layer].index_copy_(0, self._index, k.reshape(-1, dim))
        slots.flat_values[layer].index_copy_(0, self._index, v.reshape(-1, dim))
        # the heads of a group become query positions of their one key head: much faster than enable_gqa
        query = q.reshape(n, g.kv_heads, -1, dim)
        if self._padded is not None:
            query = query.new_zeros(self._view, *query.shape[1:]).index_copy_(0, self._padded, query)
        keys = slots.keys[layer][: self._view, :, : self._reach]
        values = slots.values[layer][: self._view, :, : self._reach]
        out = F.scaled_dot_product_attention(query, keys, values, self._mask)
        return (out if self._padded is None else out[self._padded]).reshape(n, g.heads, dim)


class Span(NamedTuple):
    """Tokens [start, end) of a row that a prefill computes."""

    row: int
    start: int
    end: int


class PrefillAttention:
    """Several rows' new tokens, packed one after another; attention runs row by row."""

    def __init__(self, slots: Slots, spans: list[Span]) -> None:
        self._slots, self._spans = slots, spans
        device, dtype = slots.cache.device, slots.cache.dtype
        self._masks: list[Tensor | None] = []
        for span in spans:
            mask = None
            if span.start:
                columns = torch.arange(span.end, device=device)
                hidden = columns > columns[span.start :, None]
                mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            self._masks.append(mask)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, g = self._slots, self._slots.geometry
        keys, values = slots.keys[layer], slots.values[layer]
        out, offset = torch.empty_like(q), 0
        for span, mask in zip(self._spans, self._masks, strict=True):
            n = span.end - span.start
            part = slice(offset, offset + n)
            keys[span.row, :, span.start : span.end] = k[part].transpose(0, 1)
            values[span.row, :, span.start : span.end] = v[part].transpose(0, 1)
            query = q[part].view(n, g.kv_heads, -1, g.head_dim).permute(1, 2, 0, 3)
            shape = (g.kv_heads, query.shape[1], span.end, g.head_dim)
            o = F.scaled_dot_product_attention(
                query,
                keys[span.row, :, None, : span.end].expand(shape),
                values[span.row, :, None, : span.end].expand(shape),
                mask,
                is_causal=mask is None,
            )
            out[part] = o.permute(2, 0, 1, 3).reshape(n, g.heads, g.head_dim)
            offset += n
        return out
