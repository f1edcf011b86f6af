"""Which block of the cache holds which tokens: reference counts, a tree of known prefixes, eviction.

Numbers only, no tensors. A block stands for up to BLOCK tokens after a known prefix; the tree's keys
are the tokens themselves under the node of their prefix, so a hash that collides can't lie. Nodes are
never used twice, and `clear` plants a new root: what was computed before it (other weights) can't be
found after it. Used by the engine's thread only.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from uni_agent.types import Int32Array

BLOCK = 16
"""Tokens of a block. Measured: 16 and 32 are equally fast, and 16 shares more."""

_CHILDREN_LOOKED_AT = 64


class Match(NamedTuple):
    """A known prefix: whole blocks up to `node`, then `tail` tokens of the block `tail_block` (-1: none)."""

    blocks: list[int]
    node: int
    tail_block: int
    tail: int

    @property
    def tokens(self) -> int:
        """How many tokens are known."""
        return BLOCK * len(self.blocks) + self.tail


class BlockPool:
    """`count` blocks. A block is free, idle (known, held by no row: may be evicted), or held."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evicted = 0
        self.held = np.zeros(count, np.int32)
        self._nodes = itertools.count(1)
        self.clear()

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> float:
        """The fraction of blocks that hold something."""
        return 1 - len(self._free) / self.count

    def clear(self) -> None:
        """Forget all; no row may hold a block."""
        assert not self.held.any()
        self.root = next(self._nodes)
        self._free = list(range(self.count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._node = np.zeros(self.count, np.int64)
        """0: nobody can find the block."""
        self._parent = np.zeros(self.count, np.int64)
        self._tokens = np.full((self.count, BLOCK), -1, np.int32)
        """-1 behind the block's last known token."""
        self._owner: list[str | None] = [None] * self.count
        self._whole: dict[tuple[int, bytes], int] = {}
        self._children: dict[int, dict[int, None]] = {}

    def take(self) -> int:
        """A block for the caller to hold, the one idle for longest if need be."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._unlist(block)
            self.evicted += 1
        self.held[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Hold a block that was found, or that another row holds."""
        self.held[block] += 1
        self._idle.pop(block, None)

    def drop(self, block: int) -> None:
        """Hold a block no longer."""
        self.held[block] -= 1
        if self.held[block]:
            return
        if self._node[block]:
            self._idle[block] = None
        else:
            self._free.append(block)

    def discard(self, block: int) -> bool:
        """Drop a block that holds nonsense; True when nobody else holds it, and nobody will find it."""
        alone = self.held[block] == 1
        if alone:
            self._unlist(block)
        self.drop(block)
        return bool(alone)

    def num_idle(self, blocks: list[int]) -> int:
        """How many of these blocks are idle: holding them makes that many fewer available."""
        return sum(block in self._idle for block in blocks)

    def find(self, tokens: Int32Array) -> Match:
        """The longest known prefix of `tokens`."""
        node, blocks = self.root, list[int]()
        at = 0
        while at + BLOCK <= len(tokens):
            block = self._whole.get((node, tokens[at : at + BLOCK].tobytes()))
            if block is None:
                break
            blocks.append(block)
            node = int(self._node[block])
            at += BLOCK
        rest = tokens[at : at + BLOCK]
        children = self._children.get(node)
        if not len(rest) or not children:
            return Match(blocks, node, -1, 0)
        last = list(itertools.islice(reversed(children), _CHILDREN_LOOKED_AT))
        same = np.logical_and.accumulate(self._tokens[last, : len(rest)] == rest, 1).sum(1)
        best = int(same.argmax())
        return Match(blocks, node, last[best], int(same[best])) if same[best] else Match(blocks, node, -1, 0)

    def is_tail_of(self, block: int, tokens: int, session: str) -> bool:
        """Whether the session's last request ended in this block after `tokens`, and nobody holds it."""
        ends_here = tokens == BLOCK or self._tokens[block, tokens] < 0
        return bool(ends_here and self.held[block] == 0 and self._owner[block] == session)

    def list_block(self, block: int, parent: int, tokens: Int32Array, owner: str) -> tuple[int, int]:
        """Let others find a block by its 1 to BLOCK tokens after `parent`; returns (node, block).

        When another block is known to hold the same, that one is returned, and this one stays unlisted.
        """
        key = (parent, tokens.tobytes()) if len(tokens) == BLOCK else None
        if key is not None:
            known = self._whole.get(key)
            if known is not None:
                return int(self._node[known]), known
        self._unlist(block)
        node = next(self._nodes)
        self._node[block], self._parent[block], self._owner[block] = node, parent, owner
        self._tokens[block, : len(tokens)] = tokens
        self._children.setdefault(parent, {})[block] = None
        if key is not None:
            self._whole[key] = block
        return node, block

    def forget(self, session: str) -> None:
        """Free the idle block, not whole, that the session's last request ended in."""
        for block in [b for b in self._idle if self._owner[b] == session and self._tokens[b, -1] < 0]:
            del self._idle[block]
            self._unlist(block)
            self._free.append(block)

    def _unlist(self, block: int) -> None:
        node = int(self._node[block])
        if not node:
            return
        parent = int(self._parent[block])
        siblings = self._children[parent]
        del siblings[block]
        if not siblings:
            del self._children[parent]
        if self._tokens[block, -1] >= 0:
            del self._whole[parent, self._tokens[block].tobytes()]
        self._node[block] = 0
        self._tokens[block] = -1
        self._owner[block] = None
