"""Attention on the native kernel: reads blocks where they lie, shared ones once for all rows that share.
Long bfloat16 prompts go to torch, which has the faster matrix products.

In: the tokens of a pass and the rows' tables. Out: items for `kernels/attention.cpp`: tokens whose rows
begin with the same blocks. A token's result does not depend on its item. Used by the engine's thread only.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uni_agent.engines.local.attention import Pass, Span, pass_tokens
from uni_agent.engines.local.blocks import BLOCK
from uni_agent.engines.local.cache import PagedCache
from uni_agent.engines.local.rows import Int64Array

HEAD_DIMS = (32, 64, 128, 256)
"""What the kernel is compiled for."""

_MOST_SCORES = 1 << 18
"""Scores of an item that one thread keeps at hand: more would not fit its cache."""
_MOST_TOKENS = 16

_LONG_SPAN = 64
"""Tokens of a span from which on torch's attention is the faster one in bfloat16."""


class AttendKernel(Protocol):
    """The native attention; see kernels/attention.cpp."""

    def attend(  # noqa: PLR0917 - a C++ function has no names
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        row: Tensor,
        position: Tensor,
        starts: Tensor,
        tokens: Tensor,
        joint: Tensor,
        scale: float,
        softcap: float,
        window: int,
        /,
    ) -> Tensor: ...


class _Items(NamedTuple):
    """Places in the pass, item after item: sizes, tokens, and how many leading blocks an item shares."""

    sizes: list[int]
    tokens: list[int]
    joint: list[int]


class NativeAttention:
    """Plans passes for the kernel; satisfies `attention.Attention`.

    With `batch_invariant` the kernel serves all tokens: a result's bits then do not depend on how a
    prompt is cut.
    """

    def __init__(self, cache: PagedCache, kernel: AttendKernel, *, batch_invariant: bool) -> None:
        self._cache, self._kernel = cache, kernel
        g = cache.geometry
        self._torch_reach = 0  # up to which context spans may go to torch
        if not batch_invariant and cache.dtype == torch.bfloat16 and g.softcap is None:
            self._torch_reach = min(window or 1 << 62 for window in g.windows)
        self._tables = torch.from_numpy(cache.tables)
        self._decoding: tuple[int, bytes, _Items] | None = None

    def plan(self, rows: Int64Array, position: Int64Array, spans: list[Span]) -> Pass:
        """The pass for these tokens."""
        row, position = pass_tokens(rows, position, spans)
        items, long = self._decode_items(rows, position), list[_LongSpan]()
        if spans:
            items, long = self._with_spans(items, spans, len(rows))
        return _NativePass(
            self._cache, self._kernel, self._tables, row=row, position=position, items=items, long=long
        )

    def _decode_items(self, rows: Int64Array, position: Int64Array) -> _Items:
        """What was found for these rows holds until their leading blocks change."""
        known, key = self._decoding, rows.tobytes()
        if known is not None and known[:2] == (self._cache.epoch, key):
            return known[2]
        items = share(
            self._cache.tables[rows],
            position[: len(rows)] // BLOCK,
            most=self._most_tokens(int(position[: len(rows)].max(initial=0)) + BLOCK),
            least_items=-(-2 * torch.get_num_threads() // self._cache.geometry.kv_heads),
        )
        self._decoding = (self._cache.epoch, key, items)
        return items

    def _with_spans(self, items: _Items, spans: list[Span], at: int) -> tuple[_Items, list[_LongSpan]]:
        sizes, tokens, joint = (column.copy() for column in items)
        long: list[_LongSpan] = []
        for span in spans:
            size = span.end - span.start
            if size >= _LONG_SPAN and span.end <= self._torch_reach:
                long.append(_LongSpan(self._cache, span, at))
            else:
                most = self._most_tokens(span.end)
                for start in range(span.start, span.end, most):
                    end = min(start + most, span.end)
                    sizes.append(end - start)
                    joint.append((end - 1) // BLOCK + 1)
                tokens.extend(range(at, at + size))
            at += size
        return _Items(sizes, tokens, joint), long

    def _most_tokens(self, reach: int) -> int:
        group = self._cache.geometry.heads // self._cache.geometry.kv_heads
        return max(1, min(_MOST_TOKENS, _MOST_SCORES // (group * reach)))


class _LongSpan:
    """A span whose first token is the `at`-th of the pass, on torch's attention."""

    def __init__(self, cache: PagedCache, span: Span, at: int) -> None:
        self._geometry = g = cache.geometry
        self._places = slice(at, at + span.end - span.start)
        self._blocks = self._mask = None
        if span.start:
            reach = -(-span.end // BLOCK)
            self._blocks = torch.from_numpy(cache.tables[span.row, :reach].astype(np.int64))
            hidden = np.arange(reach * BLOCK) > np.arange(span.start, span.end)[:, None]
            self._mask = torch.zeros(hidden.shape, dtype=cache.dtype)
            self._mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        self._shape = (g.kv_heads, g.heads // g.kv_heads, -1, -1)

    def attend(
        self, out: Tensor, q: Tensor, own: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor]
    ) -> None:
        """Write this span's part of out [N, Hq, D]; `own` are the pass's keys and values."""
        g = self._geometry
        if self._blocks is None:
            keys, values = (x[self._places].transpose(0, 1) for x in own)
        else:  # the kernel's layout, bfloat16 pairs in it, to [Hk, tokens, D]
            keys, values = (x.index_select(0, self._blocks).flatten(2) for x in cached)
            keys = keys.view(-1, g.kv_heads, g.head_dim // 2, BLOCK, 2).permute(1, 0, 3, 2, 4)
            values = values.view(-1, g.kv_heads, BLOCK // 2, g.head_dim, 2).permute(1, 0, 2, 4, 3)
            keys, values = (x.reshape(g.kv_heads, -1, g.head_dim) for x in (keys, values))
        query = q[self._places].transpose(0, 1).unflatten(0, self._shape[:2])
        mixed = F.scaled_dot_product_attention(
            query,
            keys[:, None].expand(self._shape),
            values[:, None].expand(self._shape),
            self._mask,
            is_causal=self._mask is None,
            scale=g.scale,
        )
        out[self._places] = mixed.flatten(0, 1).transpose(0, 1)


class _NativePass:
    def __init__(
        self,
        cache: PagedCache,
        kernel: AttendKernel,
        tables: Tensor,
        *,
        row: Int64Array,
        position: Int64Array,
        items: _Items,
        long: list[_LongSpan],
    ) -> None:
        g = cache.geometry
        self._long = long
        self.row, self.position = row, position
        self._attend, self._keys, self._values = kernel.attend, cache.keys, cache.values
        starts = np.zeros(len(items.sizes) + 1, np.int32)
        np.cumsum(items.sizes, out=starts[1:])
        self._plan = (
            tables,
            torch.from_numpy(row.astype(np.int32)),
            torch.from_numpy(position.astype(np.int32)),
            torch.from_numpy(starts),
            torch.from_numpy(np.array(items.tokens, np.int32)),
            torch.from_numpy(np.array(items.joint, np.int32)),
            g.scale,
            g.softcap or 0.0,
        )
        self._windows = g.windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, window = self._keys[layer], self._values[layer], self._windows[layer] or 0
        out = self._attend(q, k, v, keys, values, *self._plan, window)
        for span in self._long:
            span.attend(out, q, (k, v), (keys, values))
        return out


def share(tables: np.ndarray, whole: Int64Array, *, most: int, least_items: int) -> _Items:
    """Group rows int32[n, width] that begin with the same blocks, of which `whole` int64[n] may be shared.

    Neighbours in the order of their tables join as long as that saves reading more blocks than it costs
    the rows before them. `most` rows an item; fewer where there would be less than `least_items`.
    """
    if not len(tables):
        return _Items([], [], [])
    width = int(whole.max())
    keys = [tables[i, : whole[i]].tobytes() for i in range(len(tables))]
    order = sorted(range(len(tables)), key=keys.__getitem__)
    leading = tables[order, :width]
    same = np.logical_and.accumulate(leading[1:] == leading[:-1], 1).sum(1)
    whole = whole[order]
    shared = np.minimum(same, np.minimum(whole[1:], whole[:-1])).tolist()
    most = max(1, min(most, len(order) // max(least_items, 1)))
    sizes, joint = [1], [int(whole[0])]
    for i, common in enumerate(shared):
        now = min(joint[-1], common)
        saves = sizes[-1] == 1 or (sizes[-1] + 1) * now >= sizes[-1] * joint[-1]
        better_with_next = i + 1 < len(shared) and shared[i + 1] > 2 * common
        if sizes[-1] < most and common and saves and not better_with_next:
            sizes[-1] += 1
            joint[-1] = now
        else:
            sizes.append(1)
            joint.append(int(whole[i + 1]))
    return _Items(sizes, order, joint)
