"""Attention over rows that hold several segments, without a mask of rows times rows.

A batch is scored as one flat row of its real tokens: padding costs nothing in the linear layers.
Inside attention the segments are gathered into small padded batches of similar length, run through
causal SDPA, and put back. Registered with transformers as `uni_agent_packed`; a forward that brings
no Packing gets transformers' own SDPA, so that generation and evaluation work as ever.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

PACKED_ATTENTION = "uni_agent_packed"

# Segments join a padded batch as long as they fill this share of its longest one.
_MIN_FILL = 0.75


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments padded to one length. `gather` int64[count * length]: flat positions (None: in order)."""

    count: int
    length: int
    gather: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Packing:
    """How a flat row of T tokens falls into segments.

    `restore` int64[T] finds each token in the concatenated outputs of `batches`; None where they are
    in order already.
    """

    batches: tuple[SegmentBatch, ...]
    restore: torch.Tensor | None


def plan_packing(lengths: npt.NDArray[np.int64], device: torch.device) -> Packing:
    """Plan for segments of these lengths that stand one after another in a flat row."""
    if (lengths == lengths[0]).all():
        return Packing((SegmentBatch(len(lengths), int(lengths[0]), None),), None)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    order = np.argsort(-lengths, kind="stable")
    restore = np.empty(int(lengths.sum()), np.int64)
    batches: list[SegmentBatch] = []
    begin, offset = 0, 0
    while begin < len(order):
        longest = int(lengths[order[begin]])
        end = begin + int((lengths[order[begin:]] >= _MIN_FILL * longest).sum())
        members = order[begin:end]
        within = np.minimum(np.arange(longest), lengths[members, None] - 1)
        positions = starts[members, None] + within
        real = np.arange(longest) < lengths[members, None]
        slots = offset + np.arange(len(members) * longest).reshape(len(members), longest)
        restore[positions[real]] = slots[real]
        gather = torch.from_numpy(positions.reshape(-1)).to(device)
        batches.append(SegmentBatch(len(members), longest, gather))
        begin, offset = end, offset + len(members) * longest
    return Packing(tuple(batches), torch.from_numpy(restore).to(device))


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
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    outputs: list[torch.Tensor] = []
    for batch in packing.batches:
        q, k, v = (_gather(states, batch) for states in flat)
        # Expanding keys and values is several times faster on CPU than SDPA's enable_gqa.
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        window = sliding_window if sliding_window is not None and sliding_window < batch.length else None
        mask = None if window is None else _band(batch.length, window, query.device)
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


def _gather(states: torch.Tensor, batch: SegmentBatch) -> torch.Tensor:
    """[T, H, D] -> [count, H, length, D]."""
    picked = states if batch.gather is None else states.index_select(0, batch.gather)
    return picked.reshape(batch.count, batch.length, *states.shape[1:]).transpose(1, 2)


@functools.lru_cache(maxsize=8)
def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool[length, length]: token i sees itself and the window - 1 tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
