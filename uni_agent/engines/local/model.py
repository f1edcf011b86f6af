"""What the local engine asks of a model: one pass over packed tokens, with the cache outside.

`Attend` is the engine's side (it owns the cache), `StepModel` the model's. Neither knows requests,
sampling or threads.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Geometry(NamedTuple):
    """What a cache and its attention must know of the model.

    `windows[layer]` is how many of the latest tokens a layer sees, the token itself included; None
    is all of them. Scores are q . k * scale, then softcap * tanh(score / softcap) where it is set.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None


class Attend(Protocol):
    """Writes k and v to the cache of `layer` and attends.

    q [N, Hq, D], k and v [N, Hk, D] (rows may be strided views of one buffer; the last dimension is
    contiguous) -> [N, Hq, D].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class StepModel(Protocol):
    """A causal LM whose keys and values live in the engine's cache."""

    module: nn.Module
    """The Hugging Face module that weights are read from."""
    geometry: Geometry
    device: torch.device
    dtype: torch.dtype
    """Of the computation and of the cache."""

    def refresh(self) -> None:
        """Take the module's parameters as they are now (an optimizer stepped, an adapter changed)."""
        ...

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: int64[N], int64[N] -> [N, H], after the last norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> float32[N, V]."""
        ...
