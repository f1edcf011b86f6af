"""From logits to tokens: temperature, top-k, top-p, logprobs, and noise that belongs to the request.

Noise is a counter-based function of (the request's seed, the index of the token), so what a request
draws depends on its logits only, never on which others run beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uni_agent.types import Float32Array, Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class RowSampling(NamedTuple):
    """Settings of n rows. `noise` is the mixed seed, `drawn` how many tokens the request has so far."""

    temperature: Float32Array
    top_p: Float32Array
    top_k: npt.NDArray[np.int64]
    noise: UInt64Array
    drawn: npt.NDArray[np.int64]


def mix(x: UInt64Array) -> UInt64Array:
    """Spread the bits of each value (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(noise: UInt64Array, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1), one per row: the `index`-th number of the row's own stream."""
    bits = mix(noise + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: Tensor, rows: RowSampling) -> tuple[Int32Array, Float32Array]:
    """Sample one token per row of float32[n, V]: ids int32[n], logprobs float32[n].

    Logprobs are at the row's temperature, before top-k and top-p. Temperature 0 takes the largest
    logit, with logprobs at temperature 1. Logits that are not finite give a logprob that is not.
    """
    greedy = rows.temperature <= 0
    scale = np.where(greedy, np.float32(1), rows.temperature)
    scaled = logits
    if (scale != 1).any():
        scaled = logits / torch.from_numpy(scale).to(logits.device)[:, None]
    logprobs = scaled.log_softmax(-1)
    if greedy.all():
        ids = logits.argmax(-1)
    else:
        ids = _inverse_cdf(logprobs.exp(), rows)
        if greedy.any():
            mask = torch.from_numpy(greedy).to(logits.device)
            ids = torch.where(mask, logits.argmax(-1), ids)
    picked = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.to(torch.int32).cpu().numpy(), picked.cpu().numpy()


def _inverse_cdf(probs: Tensor, rows: RowSampling) -> Tensor:
    """One index per row of float32[n, V] (>= 0), by the row's own uniform number."""
    size = probs.shape[-1]
    cut = (rows.temperature > 0) & ((rows.top_p < 1) | ((rows.top_k > 0) & (rows.top_k < size)))
    if cut.any():
        where = torch.from_numpy(np.flatnonzero(cut)).to(probs.device)
        top_p = torch.from_numpy(rows.top_p[cut]).to(probs.device)
        top_k = torch.from_numpy(rows.top_k[cut]).to(probs.device)
        probs[where] = _truncate(probs[where], top_p, top_k)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.from_numpy(uniforms(rows.noise, rows.drawn)).to(probs.device)[:, None]
    # below the total, so that the first entry above the target exists and has a probability above 0
    target = torch.minimum((total.double() * uniform).float(), torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=size - 1)


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what top-k, then top-p over the rest, cut off; at least one token of a row stays."""
    size = probs.shape[-1]
    ordered, order = probs.sort(-1, descending=True)
    rank = torch.arange(size, device=probs.device)
    limit = torch.where(top_k > 0, top_k, size)[:, None]
    ordered = ordered.masked_fill(rank >= limit, 0.0)
    before = ordered.cumsum(-1) - ordered
    beyond = (before >= top_p[:, None] * ordered.sum(-1, keepdim=True)) & (top_p < 1)[:, None]
    beyond[:, 0] = False
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(beyond, 0.0))
