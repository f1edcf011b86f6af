"""Critics: what a state is worth. Hidden states or token ids in, values out.

`values[t]` is the value of the state in which token t was chosen, the state before it. The shift that
this needs is made by `models.logprobs`, whose hidden states are those before each token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from uni_agent.algos.losses import TensorBatch
from uni_agent.models import HFModel, TokenOutputs, causal_lm, score_tokens


class Values(NamedTuple):
    """float[B, L] values before each token, float[B, S] after the last token of each segment."""

    before: Tensor
    end: Tensor


class Critic(Protocol):
    """Says the values of states.

    `module` holds the critic's own parameters; the learner trains, saves and loads them. With
    `needs_hidden` the learner's own pass brings the actor's hidden states.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def needs_hidden(self) -> bool: ...

    def values(self, batch: TensorBatch, actor: TokenOutputs) -> Values:
        """Values of a micro-batch; differentiable."""
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
        self._head = _head_for(model)

    @property
    def module(self) -> nn.Module:
        """The head."""
        return self._head

    def values(self, batch: TensorBatch, actor: TokenOutputs) -> Values:
        """Values from the actor's hidden states."""
        assert actor.hidden is not None
        assert actor.end_hidden is not None
        if self.train_trunk:
            return Values(self._head(actor.hidden), self._head(actor.end_hidden))
        return Values(self._head(actor.hidden.detach()), self._head(actor.end_hidden.detach()))


class ModelCritic:
    """A critic with a model of its own, which reads the same tokens (a small one will do)."""

    needs_hidden = False

    def __init__(self, model: HFModel) -> None:
        self._module = nn.ModuleDict({"trunk": model.module, "head": _head_for(model)})

    @property
    def module(self) -> nn.Module:
        """The model and its head."""
        return self._module

    def values(self, batch: TensorBatch, actor: TokenOutputs) -> Values:
        """Values from the critic's own model."""
        out = score_tokens(
            self._module["trunk"],
            batch.token_ids,
            batch.positions,
            batch.segments,
            batch.temperature,
            wanted=torch.zeros_like(batch.token_ids, dtype=torch.bool),
            with_hidden=True,
        )
        return Values(self._module["head"](out.hidden), self._module["head"](out.end_hidden))


def _head_for(model: HFModel) -> ValueHead:
    like = next(model.module.parameters())
    width = int(causal_lm(model.module).get_output_embeddings().weight.shape[1])
    return ValueHead(width).to(like.device, torch.promote_types(like.dtype, torch.float32))
