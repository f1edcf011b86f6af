"""Losses over packed micro-batches: the model's outputs and a batch in, a scalar and sums out.

Each loss returns (sum(weights * token_loss), stats). There is no denominator, so micro-batches,
packing and padding cannot change it. Stats are detached scalars that micro-batches combine by their
name's ending: `_sum` is added and reported as the mean over trained tokens, `_max` is the maximum,
anything else is added.

Positions of weight 0 are replaced before any arithmetic, so that a NaN there reaches neither value
nor gradient; a NaN at a trained position shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from uni_agent.algos.kl import KL, k1, k3, off_policy
from uni_agent.errors import ConfigError
from uni_agent.protocols import Loss
from uni_agent.types import Batch

Stats = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the model says about each token, float[B, L]: entry t is about token t.

    `values[t]` is the critic's value of the state before token t.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """`types.Batch` as tensors [B, L]: ids, positions, segments, versions int64, the rest floats."""

    token_ids: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor
    advantages: Tensor
    behavior_logprobs: Tensor
    temperature: Tensor
    versions: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def from_numpy(cls, batch: Batch, *, device: torch.device | str = "cpu") -> TensorBatch:
        """Copy a (micro-)batch to the device, once."""

        def move(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            return tensor.to(device, torch.float32 if tensor.is_floating_point() else torch.int64)

        def perhaps(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else move(array)

        return cls(
            token_ids=move(batch.token_ids),
            positions=move(batch.positions),
            segments=move(batch.segments),
            weights=move(batch.weights),
            advantages=move(batch.advantages),
            behavior_logprobs=move(batch.behavior_logprobs),
            temperature=move(batch.temperature),
            versions=move(batch.versions),
            ref_logprobs=perhaps(batch.ref_logprobs),
            values=perhaps(batch.values),
            returns=perhaps(batch.returns),
        )

    @property
    def trained(self) -> Tensor:
        """bool[B, L]: the tokens whose weight is not 0."""
        return self.weights != 0


def policy_clip(
    outputs: Outputs,
    batch: TensorBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl: KL = k3,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy-gradient loss (PPO, arXiv 1707.06347).

    The ratio is of the current to the behaviour logprob and is clipped to [1 - clip_low,
    1 + clip_high] (apart from each other: DAPO, arXiv 2503.14476). `kl_coef` adds the KL to the
    reference, by `k2` or `k3`; tokens of an older policy enter it with their detached ratio.
    `entropy_coef` rewards entropy. Raises ConfigError for an input that is missing.
    """
    trained = batch.trained
    logprobs = _only(trained, outputs.logprobs)
    log_ratio = logprobs - _only(trained, batch.behavior_logprobs).to(logprobs.dtype)
    advantages = _only(trained, batch.advantages)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        # min() chose the clipped branch: those tokens have no gradient.
        cut = (clipped * advantages < ratio * advantages).sum()
        stats = {
            "clip_fraction_sum": cut.to(ratio.dtype),
            "approx_kl_sum": k3(_only(trained, batch.behavior_logprobs).to(logprobs.dtype), logprobs).sum(),
            "ratio_max": _only(trained, ratio).max(),
            "ratio_error_max": (ratio - 1.0).abs().max(),
            "logprob_gap_sum": log_ratio.abs().sum(),
            "logprob_gap_max": log_ratio.abs().max(),
            "policy_loss": (batch.weights * token_loss).sum(),
        }
    if outputs.entropy is not None:
        entropy = _only(trained, outputs.entropy)
        stats["entropy_sum"] = entropy.detach().sum()
        if entropy_coef:  # else the entropy stays out of the graph
            token_loss = token_loss - entropy_coef * entropy
    elif entropy_coef:
        raise ConfigError(f"entropy_coef is {entropy_coef}, but the learner was told not to compute entropy")
    if kl_coef:
        if kl is k1:
            raise ConfigError("k1 as a loss has expected gradient 0; use k2 or k3, or the reward")
        ref = _only(trained, _need(batch.ref_logprobs, "kl_coef", "reference logprobs")).to(logprobs.dtype)
        divergence = kl(logprobs, ref)
        stats["ref_kl_sum"] = divergence.detach().sum()
        token_loss = token_loss + kl_coef * off_policy(divergence, log_ratio)
    return (batch.weights * token_loss).sum(), stats


def value_clip(
    outputs: Outputs, batch: TensorBatch, *, clip: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values to the returns, the move from the old values clipped.

    `clip` is in units of value; None does not clip. Raises ConfigError without a critic.
    """
    trained = batch.trained
    values = _only(trained, _need(outputs.values, "the value loss", "values (a critic)"))
    returns = _only(trained, _need(batch.returns, "the value loss", "returns (gae)")).to(values.dtype)
    errors = (values - returns).square()
    if clip is not None:
        old = _only(trained, _need(batch.values, "the value clip", "old values (learner.score)"))
        old = old.to(values.dtype)
        near = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    loss = (batch.weights * 0.5 * errors).sum()
    with torch.no_grad():
        stats = {
            "value_loss": loss.detach(),
            "value_sum": values.sum(),
            "return_sum": returns.sum(),
            "value_error_sum": (values - returns).square().sum(),
        }
    return loss, stats


def sft(outputs: Outputs, batch: TensorBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the tokens that a demonstrator chose."""
    nll = -_only(batch.trained, outputs.logprobs)
    stats = {"nll_sum": nll.detach().sum()}
    if outputs.entropy is not None:
        stats["entropy_sum"] = _only(batch.trained, outputs.entropy).detach().sum()
    return (batch.weights * nll).sum(), stats


def combine(*parts: tuple[float, Loss]) -> Loss:
    """Add losses with their coefficients; a statistic that two of them report raises ValueError."""

    def total(outputs: Outputs, batch: TensorBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = outputs.logprobs.new_zeros(())
        stats: dict[str, Tensor] = {}
        for coef, part in parts:
            value, own = part(outputs, batch)
            both = stats.keys() & own.keys()
            if both:
                raise ValueError(f"two losses report {', '.join(sorted(both))}; combine each loss once")
            loss = loss + coef * value
            stats.update(own)
        return loss, stats

    return total


def merge_stats(totals: dict[str, Tensor], stats: Stats) -> None:
    """Add the statistics of one more micro-batch to `totals`, by the rule of the module."""
    for name, value in stats.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value


def finish_stats(totals: Stats, num_tokens: int) -> dict[str, float]:
    """Turn sums into metrics `train/...`: `_sum` becomes the mean over the trained tokens."""
    metrics: dict[str, float] = {}
    for name, value in totals.items():
        number = float(value)
        if name.endswith("_sum"):
            metrics[f"train/{name.removesuffix('_sum')}"] = number / max(num_tokens, 1)
        else:
            metrics[f"train/{name}"] = number
    return metrics


def _only(trained: Tensor, values: Tensor) -> Tensor:
    return torch.where(trained, values, 0.0)


def _need(tensor: Tensor | None, who: str, what: str) -> Tensor:
    if tensor is None:
        raise ConfigError(f"{who} needs {what}, and the batch has none; configure the learner to give them")
    return tensor
