"""Critics: what a state is worth. Hidden states or token ids in, values per token out.

A critic says the value of the state *after* each token; `values_before` is the one place that shifts
it, so that `values[t]` is the value of the state in which token t was chosen.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from uni_agent.algos.losses import TensorBatch
from uni_agent.errors import ConfigError
from uni_agent.models import HFModel
from uni_agent.models.logprobs import score_tokens


class Critic(Protocol):
    """The value of the state after each token.

    `module` holds the critic's own parameters; the learner trains, saves and loads them. With
    `needs_hidden` the learner hands over the actor's last hidden states float[B, L, H].
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def needs_hidden(self) -> bool: ...

    def after(self, batch: TensorBatch, hidden: Tensor | None) -> Tensor:
        """Values float[B, L]; entry t is the state that ends with token t."""
        ...


class ValueHead(nn.Module):
    """Hidden states float[..., H] -> values float32[...]: one hidden layer, and 0 everywhere at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the head in its own precision."""
        inner = torch.nn.functional.gelu(self.inner(hidden.to(self.inner.weight.dtype)))
        return self.outer(inner).squeeze(-1)


class TrunkCritic:
    """A value head on the actor's own hidden states.

    Unless `train_trunk`, the value loss stops at the head and cannot move the policy.
    """

    needs_hidden = True

    def __init__(self, model: HFModel, *, train_trunk: bool = False) -> None:
        self.train_trunk = train_trunk
        like = next(model.module.parameters())
        self._head = ValueHead(hidden_size(model)).to(
            like.device, torch.promote_types(like.dtype, torch.float32)
        )

    @property
    def module(self) -> nn.Module:
        """The head."""
        return self._head

    def after(self, batch: TensorBatch, hidden: Tensor | None) -> Tensor:
        """Values float[B, L] from the actor's hidden states."""
        assert hidden is not None
        return self._head(hidden if self.train_trunk else hidden.detach())


class ModelCritic:
    """A critic with a model of its own, which reads the same tokens (a small one will do)."""

    needs_hidden = False

    def __init__(self, model: HFModel) -> None:
        like = next(model.module.parameters())
        head = ValueHead(hidden_size(model)).to(like.device, torch.promote_types(like.dtype, torch.float32))
        self._module = nn.ModuleDict({"trunk": model.module, "head": head})

    @property
    def module(self) -> nn.Module:
        """The model and its head."""
        return self._module

    def after(self, batch: TensorBatch, hidden: Tensor | None) -> Tensor:
        """Values float[B, L] from the critic's own model."""
        out = score_tokens(
            self._module["trunk"],
            batch.token_ids,
            batch.positions,
            batch.segments,
            batch.temperature,
            wanted=torch.zeros_like(batch.token_ids, dtype=torch.bool),
            with_hidden=True,
        )
        return self._module["head"](out.hidden)


def values_before(after: Tensor, segments: Tensor) -> Tensor:
    """Shift by one token: [B, L] values after each token -> values of the state before it.

    0 at the first token of a segment, before which there is no state.
    """
    shifted = torch.zeros_like(after)
    same = segments[:, 1:] == segments[:, :-1]
    shifted[:, 1:] = torch.where(same, after[:, :-1], 0.0)
    return shifted


def hidden_size(model: HFModel) -> int:
    """The width of the model's hidden states. Raises ConfigError for a model that has no config."""
    config = getattr(model.module, "config", None)
    size = getattr(config, "hidden_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"{type(model.module).__name__} has no config.hidden_size; a value head needs it")
    return size
