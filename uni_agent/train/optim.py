"""The optimizer: AdamW over an actor and perhaps a critic; the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from uni_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW and its schedule. Steps are optimizer updates.

    lr: peak. critic_lr: of the critic; None takes lr. betas, weight_decay (matrices only).
    warmup_steps: linear from lr / warmup_steps; 0 begins at lr. decay: from the end of the warm-up to
    `total_steps`, where lr * final_lr_ratio is reached and stays. max_grad_norm: over all parameters;
    0 does not clip.
    """

    lr: float = 1e-6
    critic_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0
    final_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "linear", "cosine"):
            raise ConfigError(f"decay is {self.decay!r}; expected 'constant', 'linear' or 'cosine'")
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"decay {self.decay!r} needs total_steps above warmup_steps; "
                f"they are {self.total_steps} and {self.warmup_steps}"
            )


def lr_factor(config: OptimConfig, step: int) -> float:
    """The factor on the peak learning rate for the update number `step`, counted from 1."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    # The first update after the warm-up has the peak; the update `total_steps` has the final rate.
    span = max(config.total_steps - config.warmup_steps - 1, 1)
    done = min((step - config.warmup_steps - 1) / span, 1.0)
    remaining = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * remaining


def make_adamw(config: OptimConfig, actor: nn.Module, critic: nn.Module | None) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; each group remembers its peak rate as `peak_lr`."""
    groups = _groups(actor.parameters(), config.lr, config.weight_decay)
    if critic is not None:
        critic_lr = config.lr if config.critic_lr is None else config.critic_lr
        groups += _groups(critic.parameters(), critic_lr, config.weight_decay)
    if not groups:
        raise ConfigError("the model has no parameter that requires a gradient; nothing can be trained")
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, object]]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    split = [([p for p in trained if p.ndim >= 2], weight_decay), ([p for p in trained if p.ndim < 2], 0.0)]
    return [
        {"params": params, "lr": lr, "peak_lr": lr, "weight_decay": decay}
        for params, decay in split
        if params
    ]
