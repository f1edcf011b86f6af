"""RMS norm with a short backward. On a CPU norms are bound by memory, and autograd's own passes are many."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Modules of transformers that compute weight * x / sqrt(mean(x^2) + variance_epsilon).
_PLAIN = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm")


def speed_up_norms(module: nn.Module) -> None:
    """Give the RMS norms of known families a faster forward and backward; others stay as they are."""
    for part in module.modules():
        if type(part).__name__ in _PLAIN:
            part.forward = types.MethodType(_forward, part)


def _forward(module: Any, x: Tensor) -> Tensor:
    weight: Tensor = module.weight
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return type(module).forward(module, x)
    if x.is_cpu and torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, module.variance_epsilon)  # pyright: ignore[reportReturnType]
    return F.rms_norm(x, weight.shape, weight, module.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    """x float32[..., H], weight float32[H] -> float32[..., H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the stub names a positional ctx
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        normed, weight, scale = ctx.saved_tensors
        size = weight.shape[0]
        product = grad * normed
        along = (product @ (weight / size)).unsqueeze(-1)
        grad_x = torch.addcmul(grad * weight, normed, along, value=-1).mul_(scale)
        return grad_x, product.reshape(-1, size).sum(0), None
