"""What a probing pass sees of a model's attention, and plain attention to check the engine's against.

In: the calls that layers make, with the masks that transformers made for them. Out: windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import sdpa_mask

from uni_agent.engines.local.model import Attend, Geometry

MASKED_PROBE = "uni_agent_engine_probe"
"""The name under which our attention is registered together with masks."""


class LayerCall(NamedTuple):
    """One layer's call of the attention function: q [N, H, D], k [N, K, D], v [N, K, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    mask: Tensor | None


class ProbeCache(Cache):
    """Says that `seen` tokens came before, and stores nothing."""

    def __init__(self, seen: int) -> None:
        super().__init__(layers=[])
        self._seen = seen

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._seen + query_length, 0


def full_mask(*_: Any, **settings: Any) -> Tensor | None:
    """transformers' mask function that always makes the whole mask: bool[B, 1, N, reach]."""
    settings["allow_is_causal_skip"] = False
    return sdpa_mask(**settings)


def window_of(call: LayerCall, context_size: int) -> int | None:
    """How many of the latest tokens a layer sees at the end of a context; None for all, 0 for "other"."""
    rows = call.q.shape[0]
    if call.mask is None:
        window = call.window
        return None if window is None or window >= context_size else window
    mask = call.mask
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (rows, context_size):
        return 0
    mask = mask[0, 0]
    window = int(mask[-1].sum())
    position = torch.arange(context_size - rows, context_size, device=mask.device)[:, None]
    distance = position - torch.arange(context_size, device=mask.device)
    if torch.equal(mask, distance >= 0):
        return None
    return window if torch.equal(mask, (distance >= 0) & (distance < window)) else 0


def dense_attend(geometry: Geometry, passes: list[list[int]]) -> Attend:
    """Plain attention over sequences whose tokens come in several passes.

    `passes` gives, for each pass, the sequence of each of its tokens. Keeps all keys and values.
    """
    rows = [torch.tensor(owners) for owners in passes]
    keys: list[list[Tensor]] = [[] for _ in range(geometry.layers)]
    values: list[list[Tensor]] = [[] for _ in range(geometry.layers)]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[layer].append(k)
        values[layer].append(v)
        owner = torch.cat(rows[: len(keys[layer])]).to(q.device)
        groups = geometry.heads // geometry.kv_heads
        all_k, all_v = (torch.cat(part[layer]).repeat_interleave(groups, 1) for part in (keys, values))
        order = torch.arange(len(owner), device=q.device)
        new = order[-len(q) :]
        # the tokens of a sequence stand in order, so that its n-th token is the n-th of its owner
        place = torch.stack([(owner[:i] == owner[i]).sum() for i in order.tolist()])
        distance = place[new][:, None] - place
        seen = (owner[new][:, None] == owner) & (distance >= 0)
        window = geometry.windows[layer]
        if window is not None:
            seen &= distance < window
        scores = torch.einsum("qhd,khd->hqk", q.float(), all_k.float()) * geometry.scale
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, all_v.float()).to(q.dtype)

    return attend
