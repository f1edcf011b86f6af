"""From logits to tokens: temperature, top-k, top-p, logprobs, and noise that belongs to the request.

Noise is a counter-based function of (the request's seed, the index of the token), so what a request
draws depends on its logits only, never on which others run beside it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from uni_agent.types import BoolArray, Float32Array, Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Bias(NamedTuple):
    """What is added to some logits: int64[k], float32[k]."""

    ids: npt.NDArray[np.int64]
    values: Float32Array


class RowSampling(NamedTuple):
    """Settings of n rows. `noise` is the mixed seed, `drawn` how many tokens the request has so far.

    `biases` names the rows (0 to n - 1) that have one.
    """

    temperature: Float32Array
    top_p: Float32Array
    top_k: npt.NDArray[np.int64]
    noise: UInt64Array
    drawn: npt.NDArray[np.int64]
    biases: tuple[tuple[int, Bias], ...] = ()


def mix(x: UInt64Array) -> UInt64Array:
    """Spread the bits of each value (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(noise: UInt64Array, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1), one per row: the `index`-th number of the row's own stream."""
    bits = mix(noise + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SampleKernel(Protocol):
    """The native way to draw without truncation and bias; see kernels/sampling.cpp."""

    def sample(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]: ...


def draw(
    logits: Tensor, rows: RowSampling, kernel: SampleKernel | None = None
) -> tuple[Int32Array, Float32Array]:
    """Sample one token per row of float32[n, V]: ids int32[n], logprobs float32[n].

    Logprobs are at the row's temperature, before bias, top-k and top-p. Temperature 0 takes the largest
    logit, with logprobs at temperature 1. Logits that are not finite give a logprob that is not. With
    `kernel` the sums are rounded otherwise; which way a row is drawn depends on its own settings only.
    """
    if kernel is None:
        return _draw_torch(logits, rows)
    special = _truncated(rows, logits.shape[-1])
    special[[i for i, _ in rows.biases]] = True
    if special.any():
        return _draw_apart(logits, rows, kernel, special)
    ids, logprobs = kernel.sample(
        logits.contiguous(),
        torch.from_numpy(rows.temperature),
        torch.from_numpy(uniforms(rows.noise, rows.drawn)),
    )
    return ids.numpy(), logprobs.numpy()


def _draw_apart(
    logits: Tensor, rows: RowSampling, kernel: SampleKernel, special: BoolArray
) -> tuple[Int32Array, Float32Array]:
    ids, logprobs = np.zeros(len(special), np.int32), np.zeros(len(special), np.float32)
    for part, way in ((special, None), (~special, kernel)):
        if part.any():
            where = np.flatnonzero(part)
            biases = tuple((int(np.searchsorted(where, i)), bias) for i, bias in rows.biases if part[i])
            some = RowSampling(
                rows.temperature[where],
                rows.top_p[where],
                rows.top_k[where],
                rows.noise[where],
                rows.drawn[where],
                biases,
            )
            ids[where], logprobs[where] = draw(logits[torch.from_numpy(where)], some, way)
    return ids, logprobs


def _truncated(rows: RowSampling, size: int) -> BoolArray:
    return (rows.temperature > 0) & ((rows.top_p < 1) | ((rows.top_k > 0) & (rows.top_k < size)))


def _draw_torch(logits: Tensor, rows: RowSampling) -> tuple[Int32Array, Float32Array]:
    greedy = rows.temperature <= 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), rows.temperature)).to(logits.device)[:, None]
    probs = (logits / scale).softmax(-1)
    shifted, wanted = logits, probs
    if rows.biases:
        shifted = logits.clone()
        for i, bias in rows.biases:
            places = torch.from_numpy(bias.ids).to(logits.device)
            shifted[i].index_add_(0, places, torch.from_numpy(bias.values).to(logits.device))
        wanted = (shifted / scale).softmax(-1)
    if greedy.all():
        ids = shifted.argmax(-1)
    else:
        ids = _inverse_cdf(wanted, rows)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(logits.device), shifted.argmax(-1), ids)
    picked = probs.gather(-1, ids[:, None])[:, 0].log()
    return ids.to(torch.int32).cpu().numpy(), picked.cpu().numpy()


def _inverse_cdf(probs: Tensor, rows: RowSampling) -> Tensor:
    """One index per row of float32[n, V] (>= 0), by the row's own uniform number."""
    size = probs.shape[-1]
    cut = _truncated(rows, size)
    if cut.any():
        where = torch.from_numpy(np.flatnonzero(cut)).to(probs.device)
        top_p = torch.from_numpy(rows.top_p[cut]).to(probs.device)
        top_k = torch.from_numpy(rows.top_k[cut]).to(probs.device)
        probs = probs.index_copy(0, where, _truncate(probs[where], top_p, top_k))
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
