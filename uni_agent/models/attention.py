"""Attention over rows that hold several segments, without a mask of rows times rows.

A batch is scored as one flat row of its real tokens: padding costs nothing in the linear layers, and
a prefix that several segments begin with (the prompt of a group, a system prompt) is in the row once.
Inside attention the segments are gathered into small padded batches of similar size, run through
SDPA, and put back. Registered with transformers as `uni_agent_packed`; a forward that brings
no Packing gets transformers' own SDPA, so that generation and evaluation work as ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

PACKED_ATTENTION = "uni_agent_packed"

# Segments join a padded batch as long as they fill this share of their place in it.
_MIN_FILL = 0.56
# Fewer shared tokens than this are computed again: attention to a prefix needs a mask.
_MIN_SHARED = 16
# The most elements of one segment's mask; a segment beyond it is computed whole.
_MAX_MASK = 1 << 24

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Segments as paths through a tree: each owns its last tokens, and shares those before.

    kept int64[U]: the tokens that remain, in order. node int64[T]: where in them each token is found.
    shared int64[N]: how many leading tokens of each segment belong to others.
    """

    kept: Int64Array
    node: Int64Array
    shared: Int64Array


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Own tokens of `count` segments, padded to `length`, and what they see, padded to `reach`.

    queries int64[count * length] and keys int64[count * reach] are places in the flat row (None: in
    order). shared int64[count] counts the keys before the first own token; None where all are 0, and
    then queries and keys are the same tokens.
    """

    count: int
    length: int
    reach: int
    queries: torch.Tensor | None
    keys: torch.Tensor | None
    shared: torch.Tensor | None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict[int | None, torch.Tensor])
    """Made by the first layer of each window, and used by the next ones."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a flat row of U tokens falls into segments.

    `restore` int64[U] finds each token in the concatenated outputs of `batches`; None where they are
    in order already.
    """

    batches: tuple[SegmentBatch, ...]
    restore: torch.Tensor | None


def share_prefixes(keys: Int64Array, lengths: Int64Array) -> Sharing:
    """Find what segments have in common; keys int64[T] are equal where token and position are."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    shared = np.zeros(len(lengths), np.int64)
    source = np.arange(len(keys))
    # sorted as big-endian bytes, that is by content, the longest common prefix is with the neighbour
    order = sorted(range(len(lengths)), key=lambda i: keys[starts[i] : ends[i]].astype(">u8").tobytes())
    for before, i in itertools.pairwise(order):
        n = int(min(lengths[before], lengths[i]))
        differ = keys[starts[before] : starts[before] + n] != keys[starts[i] : starts[i] + n]
        common = int(differ.argmax()) if differ.any() else n
        if common >= _MIN_SHARED and (lengths[i] - common) * lengths[i] <= _MAX_MASK:
            shared[i] = common
            source[starts[i] : starts[i] + common] = source[starts[before] : starts[before] + common]
    own = source == np.arange(len(keys))
    return Sharing(np.flatnonzero(own), (np.cumsum(own) - 1)[source], shared)


def plan_packing(lengths: Int64Array, sharing: Sharing, device: torch.device) -> Packing:
    """Plan for segments of these lengths, their prefixes shared so."""
    if not sharing.shared.any() and (lengths == lengths[0]).all():
        length = int(lengths[0])
        return Packing((SegmentBatch(len(lengths), length, length, None, None, None),), None)
    starts = np.cumsum(lengths) - lengths
    own = lengths - sharing.shared
    restore = np.empty(len(sharing.kept), np.int64)
    batches: list[SegmentBatch] = []
    offset = 0
    for members in similar_sizes(own, lengths, sharing.shared):
        length, reach = int(own[members].max()), int(lengths[members].max())
        first, last = starts[members, None], lengths[members, None] - 1
        shared = sharing.shared[members, None]
        within = shared + np.arange(length)
        queries = sharing.node[first + np.minimum(within, last)]
        slots = offset + np.arange(len(members) * length).reshape(len(members), length)
        real = within <= last
        restore[queries[real]] = slots[real]
        offset += len(members) * length
        keys = sharing.node[first + np.minimum(np.arange(reach), last)] if shared.any() else queries
        batches.append(
            SegmentBatch(
                len(members),
                length,
                reach,
                torch.from_numpy(queries.reshape(-1)).to(device),
                torch.from_numpy(keys.reshape(-1)).to(device),
                torch.from_numpy(shared[:, 0]).to(device) if shared.any() else None,
            )
        )
    return Packing(tuple(batches), torch.from_numpy(restore).to(device))


def similar_sizes(own: Int64Array, lengths: Int64Array, shared: Int64Array) -> Iterator[Int64Array]:
    """Groups of segments that waste little when padded to one size; those with shared tokens apart.

    Own tokens attend to all `lengths`, of which `shared` stand before them; the groups hold indices.
    """
    for part in (shared == 0, shared > 0):
        order = np.flatnonzero(part & (own > 0))
        order = order[np.argsort(-own[order] * lengths[order], kind="stable")]
        begin = length = reach = 0
        for at, i in enumerate(order.tolist()):
            length, reach = max(length, int(own[i])), max(reach, int(lengths[i]))
            if own[i] * lengths[i] < _MIN_FILL * length * reach:
                yield order[begin:at]
                begin, length, reach = at, int(own[i]), int(lengths[i])
        if begin < len(order):
            yield order[begin:]


def packed_attention(  # noqa: PLR0917 - transformers' signature of attention functions
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packing: Packing | None = None,
    **rest: Any,  # transformers hands every attention function what any of them takes
) -> tuple[torch.Tensor, None]:
    """Causal attention within segments: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises ValueError for soft-capped scores and attention sinks, which SDPA cannot compute.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with soft-capped scores or sinks is not supported by SDPA")
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
    flat_q, flat_k, flat_v = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs: list[torch.Tensor] = []
    for batch in packing.batches:
        q = _gather(flat_q, batch.queries, batch.count)
        k, v = (_gather(states, batch.keys, batch.count) for states in (flat_k, flat_v))
        # Expanding keys and values is several times faster on CPU than SDPA's enable_gqa.
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask = _mask(batch, sliding_window, q)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
        outputs.append(out.transpose(1, 2).reshape(batch.count * batch.length, *out.shape[1::2]))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packing.restore is not None:
        joined = joined.index_select(0, packing.restore)
    return joined.unsqueeze(0), None


def register_packed_attention() -> None:
    """Make `uni_agent_packed` known to transformers; doing so twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def _gather(states: torch.Tensor, where: torch.Tensor | None, count: int) -> torch.Tensor:
    """[U, H, D] -> [count, H, length, D]."""
    picked = states if where is None else states.index_select(0, where)
    return picked.reshape(count, -1, *states.shape[1:]).transpose(1, 2)


def _mask(batch: SegmentBatch, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
    """[count or 1, 1, length, reach]: 0 where a query sees a key, else -inf; None for plain causal."""
    if window is not None and window >= batch.reach:
        window = None
    if batch.shared is None and window is None:
        return None
    if window not in batch.masks:
        device = query.device
        shared = torch.zeros(1, dtype=torch.int64, device=device) if batch.shared is None else batch.shared
        position = shared[:, None] + torch.arange(batch.length, device=device)
        distance = position[:, :, None] - torch.arange(batch.reach, device=device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = query.new_zeros(hidden.shape, requires_grad=False).masked_fill_(hidden, -torch.inf)
        batch.masks[window] = mask[:, None]
    return batch.masks[window]
