"""Estimators of KL(policy || reference) from sampled tokens (Schulman, joschu.net/blog/kl-approx).

Elementwise over torch tensors of logprobs in nats. As values: k1 is unbiased and may be negative; k2
is biased and low in variance; k3 is unbiased and not negative. As losses, on-policy: k1 has expected
gradient 0 (so it is refused there), k2 has the gradient of the reverse KL, k3 that of the forward KL.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KL = Callable[[Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs) -> KL per token, same shape."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q / p - 1 - log(q / p)."""
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


def off_policy(kl: Tensor, log_ratio: Tensor, *, cap: float = 10.0) -> Tensor:
    """Weigh the KL of tokens that an older policy sampled by p / p_behaviour, without gradient.

    The weight is cut at `cap`, so that one improbable token cannot outweigh the batch.
    """
    return kl * log_ratio.detach().exp().clamp(max=cap)
