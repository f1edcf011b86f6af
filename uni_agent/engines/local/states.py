"""States of sequences in transformers' own caches: recurrent, convolutional, keys and values.

A batch of states is one Cache whose rows belong to different sequences. Rows can be picked from
several batches into a new one. Sequences of different length stand right-aligned, padded on the left.
Knows nothing of requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from uni_agent.errors import ModelError

_KNOWN = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


@dataclass(slots=True)
class States:
    """Row i of every tensor in `cache` is what `lengths[i]` tokens of a sequence left behind."""

    cache: Cache
    lengths: list[int]

    @property
    def reach(self) -> int:
        """The longest row's tokens."""
        return max(self.lengths)

    @property
    def has_keys(self) -> bool:
        """Whether something grows with the sequence: without, rows of any length need no padding."""
        layers: list[Any] = self.cache.layers
        return any(layer.keys is not None for layer in layers if isinstance(layer, DynamicLayer))

    @property
    def num_bytes(self) -> int:
        """Of all tensors, padding included."""
        layers: list[Any] = self.cache.layers
        return sum(tensor.numel() * tensor.itemsize for layer in layers for tensor in _tensors(layer))


def gather(parts: Sequence[tuple[States, Sequence[int]]]) -> States:
    """A new batch of the named rows of each part, in order; everything is copied."""
    lengths = [states.lengths[i] for states, rows in parts for i in rows]
    device = next((t.device for layer in parts[0][0].cache.layers for t in _tensors(layer)), None)
    index = [torch.tensor(list(rows), device=device) for _, rows in parts]
    reaches = [max(states.lengths[i] for i in rows) for states, rows in parts]

    def pick(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.index_select(0, rows) for tensor, rows in zip(tensors, index, strict=True)])

    def pick_aligned(tensors: list[Tensor]) -> Tensor:
        """[B, H, stored, D] each; a window's layer stores less than its reach."""
        widths = [min(tensor.shape[-2], reach) for tensor, reach in zip(tensors, reaches, strict=True)]
        width = max(widths)
        pieces = [
            F.pad(tensor[..., tensor.shape[-2] - own :, :].index_select(0, rows), (0, 0, width - own, 0))
            for tensor, own, rows in zip(tensors, widths, index, strict=True)
        ]
        return torch.cat(pieces)

    cache: Any = copy.copy(parts[0][0].cache)
    columns = zip(*[states.cache.layers for states, _ in parts], strict=True)
    cache.layers = [_combine(list(layers), pick, pick_aligned, max(reaches)) for layers in columns]
    return States(cache, lengths)


def check_layers(cache: Cache) -> None:
    """Raise ModelError for a cache whose parts we would not know how to split and join."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) not in _KNOWN:
            raise ModelError(
                f"its cache has a {type(layer).__name__}, which the local engine cannot batch; serve the "
                "model over HTTP"
            )


def _combine(
    layers: list[Any],
    pick: Callable[[list[Tensor]], Tensor],
    pick_aligned: Callable[[list[Tensor]], Tensor],
    reach: int,
) -> Any:
    """One layer of the new cache, from that layer of each part."""
    new = copy.copy(layers[0])
    if isinstance(new, DynamicLayer) and new.keys is not None:
        new.keys = pick_aligned([layer.keys for layer in layers])
        new.values = pick_aligned([layer.values for layer in layers])
    if isinstance(new, DynamicSlidingWindowLayer):
        new.cumulative_length = reach
    if isinstance(new, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            kept: dict[int, Tensor | None] = getattr(new, name)
            states = {
                i: None if tensor is None else pick([getattr(layer, name)[i] for layer in layers])
                for i, tensor in kept.items()
            }
            setattr(new, name, states)
        new.has_previous_state = dict(new.has_previous_state)
    return new


def _tensors(layer: Any) -> list[Tensor]:
    found: list[Tensor | None] = []
    if isinstance(layer, DynamicLayer):
        found += [layer.keys, layer.values]
    if isinstance(layer, LinearAttentionLayer):
        found += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [tensor for tensor in found if tensor is not None]
