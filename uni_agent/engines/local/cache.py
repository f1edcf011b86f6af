"""The paged cache: keys and values in blocks of BLOCK tokens, and which blocks each row reads.

A row's table lists its blocks in order. Whole blocks of a known prefix are shared between rows and
with what earlier requests left; the block that a row writes to is its own, copied if need be. Used by
the engine's thread only.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from uni_agent.engines.local.blocks import BLOCK, BlockPool, Match
from uni_agent.engines.local.model import Geometry
from uni_agent.engines.local.rows import Int64Array
from uni_agent.errors import EngineError
from uni_agent.types import Int32Array

_DEFAULT_BYTES = 4 << 30


class Found(NamedTuple):
    """How many leading tokens a new row has already, and how many of them were copied for it."""

    cached: int
    copied: int


class PagedCache:
    """`blocks` blocks, each float[layers, 2, Hk, BLOCK, D], for `count` rows of up to `context` tokens.

    Raises EngineError when the memory can't be had.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        blocks: int,
        count: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry, self.pool = geometry, BlockPool(blocks)
        self.dtype, self.device = dtype, device
        shape = (geometry.layers, 2, blocks, geometry.kv_heads, BLOCK, geometry.head_dim)
        # zeros, not empty: attention multiplies masked values by 0, and 0 * NaN is NaN
        try:
            self._storage = _zeros(shape, dtype, device)
        except (MemoryError, RuntimeError) as error:
            size = math.prod(shape) * dtype.itemsize
            raise EngineError(
                f"a cache of {size / 2**30:.1f} GiB is more than this machine gives; lower cache_bytes"
            ) from error
        self.keys = [self._storage[layer, 0] for layer in range(geometry.layers)]
        self.values = [self._storage[layer, 1] for layer in range(geometry.layers)]
        self.tables = np.zeros((count, math.ceil(context / BLOCK)), np.int32)
        self.epoch = 0
        """Changes with the leading blocks of any row; blocks that are only appended don't count."""
        self._size = np.zeros(count, np.int64)
        self._node = np.zeros(count, np.int64)
        self._listed = np.zeros(count, np.int64)

    @property
    def tokens(self) -> int:
        """How many tokens the cache can hold."""
        return self.pool.count * BLOCK

    def admit(self, row: int, tokens: Int32Array, session: str, *, reserve: int) -> Found | None:
        """Give `row` the blocks for its tokens; None when fewer than `reserve` would be left after it.

        The last token is never among the known ones: it has to be computed to sample the next.
        """
        match = self.pool.find(tokens[:-1])
        own = match.tail > 0 and self.pool.is_tail_of(match.tail_block, match.tail, session)
        if not self._fits(match, len(tokens), own, reserve):
            match, own = Match(match.blocks, match.node, -1, 0), False
            if not self._fits(match, len(tokens), own, reserve):
                return None
        known = match.blocks if match.tail_block < 0 else [*match.blocks, match.tail_block]
        for block in known:
            self.pool.hold(block)
        blocks = known if own else match.blocks.copy()
        blocks += [self.pool.take() for _ in range(_num_blocks(len(tokens)) - len(blocks))]
        if match.tail and not own:
            self._storage[:, :, blocks[len(match.blocks)]] = self._storage[:, :, match.tail_block]
            self.pool.drop(match.tail_block)
        self.tables[row, : len(blocks)] = blocks
        self._size[row], self._node[row] = len(blocks), match.node
        self._listed[row] = len(match.blocks)
        self.epoch += 1
        return Found(match.tokens, 0 if own else match.tail)

    def common(self, tokens: Int32Array) -> int:
        """How many leading tokens are known."""
        return self.pool.find(tokens).tokens

    def short(self, rows: Int64Array, position: Int64Array) -> list[int]:
        """Which of `rows` lack the block to write `position` int64[n] to."""
        return rows[position // BLOCK >= self._size[rows]].tolist()

    def grow(self, row: int) -> bool:
        """Give `row` another block; False when there is none."""
        if not self.pool.available:
            return False
        self.tables[row, self._size[row]] = self.pool.take()
        self._size[row] += 1
        return True

    def publish(self, row: int, tokens: Int32Array, session: str) -> None:
        """Let others find the row's first tokens, whose keys and values are computed."""
        node, at = int(self._node[row]), int(self._listed[row])
        while (at + 1) * BLOCK <= len(tokens):
            block = int(self.tables[row, at])
            node, known = self.pool.list_block(
                block, node, tokens[at * BLOCK : (at + 1) * BLOCK].copy(), session
            )
            if known != block:  # computed twice, side by side: one of them is enough
                self.pool.hold(known)
                self.pool.drop(block)
                self.tables[row, at] = known
                self.epoch += 1
            at += 1
        self._node[row], self._listed[row] = node, at
        rest = tokens[at * BLOCK :]
        if len(rest):
            self.pool.list_block(int(self.tables[row, at]), node, rest, session)

    def release(self, row: int) -> None:
        """The row needs its blocks no longer; what was published stays until the room is needed."""
        # the last first: a prefix is worth more than what stands behind it
        for block in self.tables[row, : self._size[row]][::-1].tolist():
            self.pool.drop(block)
        self._size[row] = 0
        self.epoch += 1

    def discard(self, row: int) -> None:
        """As `release`, and wipe what the row computed: it is not to be used, not even masked."""
        wiped = [b for b in self.tables[row, : self._size[row]].tolist() if self.pool.discard(b)]
        self._storage[:, :, wiped] = 0
        self._size[row] = 0
        self.epoch += 1

    def clear(self) -> None:
        """Forget all keys and values; no row may hold blocks."""
        self.pool.clear()
        self.epoch += 1

    def _fits(self, match: Match, tokens: int, own: bool, reserve: int) -> bool:
        known = match.blocks if match.tail_block < 0 else [*match.blocks, match.tail_block]
        new = _num_blocks(tokens) - len(match.blocks) - own
        return new + reserve <= self.pool.available - self.pool.num_idle(known)


def num_blocks(
    geometry: Geometry,
    *,
    cache_bytes: int | None,
    max_running: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many blocks fit `cache_bytes`.

    None is what `max_running` requests of a full context need, but at most 4 GiB and a quarter of the
    memory that is free now.
    """
    size = geometry.layers * 2 * geometry.kv_heads * BLOCK * geometry.head_dim * dtype.itemsize
    if cache_bytes is None:
        return max(1, min(max_running * _num_blocks(context), default_bytes(device) // size))
    if cache_bytes < size:
        raise EngineError(
            f"cache_bytes is {cache_bytes}; expected at least {size}, {BLOCK} tokens of this model"
        )
    return cache_bytes // size


def default_bytes(device: torch.device) -> int:
    """The most that a cache takes unasked: 4 GiB, and a quarter of the memory that is free now."""
    return min(_DEFAULT_BYTES, _free_bytes(device) // 4)


def _num_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory is taken when it is first written; torch.zeros on a CPU writes all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    blank = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(blank).view(dtype).view(shape)
