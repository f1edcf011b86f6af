"""Low-rank adapters through PEFT: wrapping, and merged weights that never touch the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from uni_agent.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, slots=True)
class LoRA:
    """A low-rank adapter (arXiv 2106.09685): rank r, scale alpha / r; alpha None is 2 r.

    `dropout` acts only in train mode, that is in supervised training; scoring and sampling have none.
    `targets` names module suffixes; "all-linear" means every linear layer but the head.
    """

    r: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"


def add_lora(module: Any, lora: LoRA) -> PeftModel:
    """Wrap a model; only the adapter's parameters train afterwards. Raises ModelError."""
    from peft import LoraConfig, TaskType, get_peft_model

    if lora.r < 1:
        raise ModelError(f"LoRA rank r is {lora.r}; expected 1 or more")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=targets,
    )
    try:
        return get_peft_model(module, config)  # pyright: ignore[reportReturnType]
    except ValueError as problem:
        raise ModelError(f"LoRA targets {targets!r} do not fit the model: {problem}") from problem


@torch.no_grad()
def merged_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a plain model would need to behave as `module` does, under its plain names.

    Without an adapter these are the model's own tensors. With one, each adapted weight is a new tensor
    W + BA, summed in float32; the base's W is read and never written, so that merging a hundred times
    gives the same bits a hundred times.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, PeftModel):
        return dict(module.state_dict())
    base, adapter = module.get_base_model(), str(module.active_adapter)
    merged = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    for name, part in base.named_modules():
        if isinstance(part, LoraLayer) and adapter in part.lora_A:
            layer: Any = part
            weight: torch.Tensor = layer.get_base_layer().weight
            delta: torch.Tensor = layer.get_delta_weight(adapter)
            merged[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return merged
