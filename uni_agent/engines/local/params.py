"""The weight that a layer computes with, adapters included, written into memory of the engine's own.

In: layers of transformers, plain, under PEFT's LoRA or in its `modules_to_save`. Out: W + scale * B A,
summed in float32 and rounded once. Knows nothing of decoders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uni_agent.errors import ModelError


class LowRank(NamedTuple):
    """An update scale * up @ down of a weight [out, in]; up [out, r], down [r, in]."""

    up: Tensor
    down: Tensor
    scale: float


class Effective(NamedTuple):
    """A layer's weight and bias; what adapters add stands beside the parameters."""

    weight: Tensor
    bias: Tensor | None
    updates: tuple[LowRank, ...] = ()
    bias_updates: tuple[tuple[Tensor, float], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the parameters themselves are what the layer computes with."""
        return not self.updates and not self.bias_updates


def effective(module: nn.Module, name: str) -> Effective:
    """Look up what `module` (a linear layer or an embedding) computes with at this moment.

    An adapter counts also while the learner has it disabled, and once only where it is merged. Raises
    ModelError for a layer whose weight is not of this form.
    """
    module = trained_copy(module)
    layer: Any = module
    if isinstance(module, nn.Linear | nn.Embedding):
        return Effective(module.weight, getattr(layer, "bias", None))
    known = hasattr(layer, "lora_A") and isinstance(layer.base_layer, nn.Linear | nn.Embedding)
    if not known or layer.lora_variant:
        raise ModelError(
            f"{name} is a {type(module).__name__}, whose weight the local engine cannot read; "
            "supported are plain layers, LoRA without variants such as DoRA, and modules_to_save"
        )
    weight, bias, *_ = effective(layer.base_layer, name)
    if layer.merged_adapters:
        return Effective(weight, bias)
    updates: list[LowRank] = []
    biases: list[tuple[Tensor, float]] = []
    for adapter in layer.active_adapters:
        scale = float(layer.scaling.get(adapter, 0.0))
        if adapter in layer.lora_A:
            up: Any = layer.lora_B[adapter]
            updates.append(LowRank(up.weight, layer.lora_A[adapter].weight, scale))
            if up.bias is not None:
                biases.append((up.bias, scale))
        elif adapter in layer.lora_embedding_A:  # [r, V] and [H, r]: the weight is [V, H]
            down, up = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            updates.append(LowRank(down.T, up.T, scale))
    return Effective(weight, bias, tuple(updates), tuple(biases))


def trained_copy(module: nn.Module) -> nn.Module:
    """The copy that PEFT trains where a layer is in `modules_to_save`, else the layer itself."""
    copies: Any = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and len(copies):
        active: Any = getattr(module, "active_adapters", None) or list(copies)
        return copies[active[0] if active[0] in copies else next(iter(copies))]
    return module


class Writer:
    """Writes effective weights to buffers; its float32 scratch is kept between calls."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def weight(self, target: Tensor, source: Effective) -> None:
        """target [out, in], of any float dtype, becomes W + scale * B A."""
        if not source.updates:
            target.copy_(source.weight)
            return
        total = self._buffer(target)
        total.copy_(source.weight)
        for up, down, scale in source.updates:
            total.addmm_(up.float(), down.float(), alpha=scale)
        target.copy_(total)

    def bias(self, target: Tensor, source: Effective) -> None:
        """target [out] becomes the layer's bias, zeros where it has none."""
        total = torch.zeros_like(target, dtype=torch.float32)
        if source.bias is not None:
            total += source.bias.float()
        for bias, scale in source.bias_updates:
            total += scale * bias.float()
        target.copy_(total)

    def _buffer(self, like: Tensor) -> Tensor:
        if self._scratch is None or self._scratch.numel() < like.numel():
            self._scratch = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._scratch[: like.numel()].view(like.shape)
