"""Attention over the paged cache: one token for each of some rows (decode), many of others (prefill).

Both kinds go through the model in one pass. New keys and values are written first, then each token
attends to its row's. `TorchAttention` gathers blocks and calls torch; `NativeAttention` reads them
where they lie (native). Used by the engine's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uni_agent.engines.local.blocks import BLOCK
from uni_agent.engines.local.cache import PagedCache
from uni_agent.engines.local.model import Geometry
from uni_agent.engines.local.rows import Int64Array
from uni_agent.models.attention import similar_sizes

# Bytes of a cache that are gathered in the time that one more call of attention costs.
_CALL_BYTES_CPU = 1 << 16
_CALL_BYTES_GPU = 1 << 25


class Span(NamedTuple):
    """Tokens [start, end) of a row that a prefill computes."""

    row: int
    start: int
    end: int


class Pass(Protocol):
    """Attention of one pass, a `model.Attend`: a token for each of some rows, then those of spans.

    row and position int64[N] say where each token of the pass stands.
    """

    row: Int64Array
    position: Int64Array

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attention(Protocol):
    """Plans passes over one cache."""

    def plan(self, rows: Int64Array, position: Int64Array, spans: list[Span]) -> Pass:
        """`rows` decode their token at `position` int64[n]; `spans` are computed behind them."""
        ...


class TorchAttention:
    """On torch alone. With `batch_invariant` a token's result has the same bits whatever runs beside it,
    and whether it is decoded or computed as part of a prompt; each row then costs calls of its own.
    """

    def __init__(self, cache: PagedCache, *, batch_invariant: bool) -> None:
        self._cache, self._batch_invariant = cache, batch_invariant

    def plan(self, rows: Int64Array, position: Int64Array, spans: list[Span]) -> Pass:
        """The pass for these tokens."""
        row, position = pass_tokens(rows, position, spans)
        groups: list[_Group]
        if self._batch_invariant:
            groups = _aligned_groups(self._cache, row, position)
        else:
            groups = _decode_groups(self._cache, rows, position[: len(rows)])
            groups += _span_groups(self._cache, spans, len(rows))
        return _TorchPass(self._cache, row, position, groups)


def pass_tokens(rows: Int64Array, position: Int64Array, spans: list[Span]) -> tuple[Int64Array, Int64Array]:
    """Row and position int64[N] of each token of a pass."""
    if not spans:
        return rows, position
    sizes = [s.end - s.start for s in spans]
    row = np.concatenate([rows, np.repeat(np.array([s.row for s in spans], np.int64), sizes)])
    return row, np.concatenate([position, *[np.arange(s.start, s.end) for s in spans]])


@dataclass(frozen=True, slots=True)
class _Group:
    """`count` sequences that attend in one call, each padded to `length` queries.

    `queries` int64[count * length] are places in the pass, `blocks` int64[count * Hk * n] places in the
    cache as [blocks * Hk, BLOCK * D]; None where the sequences see their own tokens only. `masks` by
    window: [count or 1, length, reach]; None: causal. `real` int64[] are the queries that are no padding,
    as places in [count * length], None: all.
    """

    count: int
    length: int
    queries: Tensor
    blocks: Tensor | None
    masks: dict[int | None, Tensor | None]
    real: Int64Array | None


class _TorchPass:
    def __init__(
        self, cache: PagedCache, row: Int64Array, position: Int64Array, groups: list[_Group]
    ) -> None:
        kv_heads = cache.geometry.kv_heads
        self.row, self.position = row, position
        self._cache, self._groups = cache, groups
        block = cache.tables[row, position // BLOCK].astype(np.int64)
        heads = block[:, None] * kv_heads + np.arange(kv_heads)
        self._slots = _tensor(cache, (heads * BLOCK + (position % BLOCK)[:, None]).reshape(-1))
        self._restore = self._order(len(row))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, dim = self._cache, k.shape[-1]
        keys, values = cache.keys[layer], cache.values[layer]
        keys.view(-1, dim).index_copy_(0, self._slots, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._slots, v.reshape(-1, dim))
        window = cache.geometry.windows[layer]
        parts = [_attend(cache, group, window, q, k=(k, keys), v=(v, values)) for group in self._groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self._restore is None else out.index_select(0, self._restore)

    def _order(self, n: int) -> Tensor | None:
        """Where the groups' outputs hold each token of the pass; None: in order."""
        restore = np.zeros(n, np.int64)
        at = 0
        for group in self._groups:
            places = np.arange(group.count * group.length) if group.real is None else group.real
            restore[group.queries.cpu().numpy()[places]] = at + places
            at += group.count * group.length
        return None if at == n and np.array_equal(restore, np.arange(n)) else _tensor(self._cache, restore)


def _attend(
    cache: PagedCache,
    group: _Group,
    window: int | None,
    q: Tensor,
    *,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
) -> Tensor:
    """[count * length, Hq, D]; k and v are (the pass's own, the layer's cache)."""
    g, count, length = cache.geometry, group.count, group.length
    query = q.index_select(0, group.queries).view(count, length, g.kv_heads, -1, g.head_dim)

    def seen(own: Tensor, blocks: Tensor) -> Tensor:  # [count, Hk, reach, D]
        if group.blocks is None:
            return own.index_select(0, group.queries).view(count, length, *own.shape[1:]).transpose(1, 2)
        picked = blocks.view(-1, BLOCK * g.head_dim).index_select(0, group.blocks)
        return picked.view(count, g.kv_heads, -1, g.head_dim)

    keys, values, mask = seen(*k), seen(*v), group.masks[window]
    if length == 1 and mask is not None:
        # the heads of a group become query positions of their one key head: much faster than enable_gqa
        out = _softmax_mix(g, query[:, 0], keys, values, mask[:, None])  # [count, Hk, group, D]
        return out.reshape(count, -1, g.head_dim)
    query = query.permute(0, 2, 3, 1, 4).flatten(0, 1)  # [count * Hk, group, length, D]
    heads = query.shape[1]
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, heads, -1, -1) for x in (keys, values))
    if mask is not None:
        mask = (mask.repeat_interleave(g.kv_heads, 0) if len(mask) > 1 else mask)[:, None]
    out = _softmax_mix(g, query, keys, values, mask)
    return out.view(count, g.kv_heads, heads, length, -1).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _softmax_mix(g: Geometry, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    if g.softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, scale=g.scale
        )
    scores = (query @ keys.transpose(-1, -2)).float().mul_(g.scale / g.softcap).tanh_().mul_(g.softcap)
    if mask is None:
        n = scores.shape[-1]
        mask = scores.new_full((n, n), -torch.inf).triu_(1)
    return (scores + mask).softmax(-1).to(values.dtype) @ values


def _decode_groups(cache: PagedCache, rows: Int64Array, position: Int64Array) -> list[_Group]:
    """Rows attend together unless padding to the longest costs more than a call."""
    g = cache.geometry
    call_bytes = _CALL_BYTES_CPU if cache.device.type == "cpu" else _CALL_BYTES_GPU
    call_tokens = call_bytes / (2 * g.kv_heads * g.head_dim * cache.dtype.itemsize)
    reach = position + 1
    order = np.argsort(-reach, kind="stable")
    groups: list[_Group] = []
    begin, padding = 0, 0
    lengths = reach[order].tolist()
    for at in range(len(lengths) + 1):
        if at < len(lengths):
            padding += lengths[begin] - lengths[at]
            if padding <= call_tokens:
                continue
        if at > begin:
            members = np.sort(order[begin:at])
            groups.append(_group(cache, members[:, None], rows[members], position[members, None]))
        begin, padding = at, 0
    return groups


def _span_groups(cache: PagedCache, spans: list[Span], offset: int) -> list[_Group]:
    """Spans of similar size attend together; `offset` decoding tokens stand before them."""
    if not spans:
        return []
    row, start, end = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    sizes = end - start
    first = offset + np.cumsum(sizes) - sizes
    groups: list[_Group] = []
    for members in similar_sizes(sizes, end, start):
        within = np.arange(int(sizes[members].max()))
        queries = first[members, None] + np.minimum(within, sizes[members, None] - 1)
        real = np.flatnonzero(within < sizes[members, None])
        position = start[members, None] + within
        groups.append(
            _group(cache, queries, row[members], position, real=real, fresh=not start[members].any())
        )
    return groups


def _aligned_groups(cache: PagedCache, row: Int64Array, position: Int64Array) -> list[_Group]:
    """A call for each block of queries of each row, wherever in it the real ones are: of one shape always."""
    groups: list[_Group] = []
    cuts = np.flatnonzero((np.diff(row) != 0) | (np.diff(position // BLOCK) != 0)) + 1
    for tokens in np.split(np.arange(len(row)), cuts):
        base = position[tokens[0]] // BLOCK * BLOCK
        slots = position[tokens] - base
        queries = np.full((1, BLOCK), tokens[0])
        queries[0, slots] = tokens
        groups.append(
            _group(cache, queries, row[tokens[:1]], (base + np.arange(BLOCK))[None], real=slots, fresh=False)
        )
    return groups


def _group(
    cache: PagedCache,
    queries: Int64Array,
    rows: Int64Array,
    position: Int64Array,
    *,
    real: Int64Array | None = None,
    fresh: bool = False,
) -> _Group:
    """queries and position int64[count, length]; `fresh`: the rows' tokens are all among the queries."""
    g = cache.geometry
    count, length = queries.shape
    reach = length if fresh else int(position.max()) // BLOCK * BLOCK + BLOCK
    blocks = None
    if not fresh:
        # a padded query may stand behind the row's last block: what it reads is masked or thrown away
        table = np.take(cache.tables, rows, 0)[:, : reach // BLOCK].astype(np.int64)
        if table.shape[1] < reach // BLOCK:
            table = np.pad(table, ((0, 0), (0, reach // BLOCK - table.shape[1])))
        blocks = _tensor(cache, (table[:, None] * g.kv_heads + np.arange(g.kv_heads)[:, None]).reshape(-1))
    return _Group(
        count,
        length,
        _tensor(cache, queries.reshape(-1)),
        blocks,
        {window: _mask(cache, position, reach, window, fresh) for window in set(g.windows)},
        real,
    )


def _mask(
    cache: PagedCache, position: Int64Array, reach: int, window: int | None, fresh: bool
) -> Tensor | None:
    """What is added to scores: float[count or 1, length, reach]; None: causal."""
    inside = window is None or window > position.max()
    if fresh:
        if inside:
            return None
        position = position[:1]
    at, seen = position[..., None], np.arange(reach)
    hidden = seen > at
    if window is not None and not inside:
        hidden |= seen <= at - window
    return _tensor(cache, np.where(hidden, np.float32(-np.inf), np.float32(0))).to(cache.dtype)


def _tensor(cache: PagedCache, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(cache.device)
