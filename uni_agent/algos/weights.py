"""How much each token trains: masks of one optimizer step in, float32 weights out.

A loss is sum(weights * token_loss) and has no denominator; what is averaged is decided here and
nowhere else. `masks` are bool[T] per trajectory (sampled, and decided to train); `episodes` names
the episode of each trajectory. The mean forms sum to 1 over the optimizer step, the others to what
they say. Where nothing trains, all weights are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from uni_agent.types import BoolArray, Float32Array

TokenWeights = Callable[[Sequence[BoolArray], Sequence[int]], list[Float32Array]]


def token_mean(masks: Sequence[BoolArray], episodes: Sequence[int] = ()) -> list[Float32Array]:
    """Every trained token of the step counts the same (DAPO, arXiv 2503.14476); the sum is 1."""
    total = sum(int(mask.sum()) for mask in masks)
    return [_fill(mask, total) for mask in masks]


def sequence_mean(masks: Sequence[BoolArray], episodes: Sequence[int] = ()) -> list[Float32Array]:
    """The mean over each trajectory's tokens, then over trajectories (GRPO); the sum is 1."""
    counts = [int(mask.sum()) for mask in masks]
    trained = sum(count > 0 for count in counts)
    return [_fill(mask, count * trained) for mask, count in zip(masks, counts, strict=True)]


def episode_mean(masks: Sequence[BoolArray], episodes: Sequence[int]) -> list[Float32Array]:
    """The mean over each episode's tokens, however many trajectories it has, then over episodes."""
    counts: dict[int, int] = {}
    for mask, episode in zip(masks, episodes, strict=True):
        counts[episode] = counts.get(episode, 0) + int(mask.sum())
    trained = sum(count > 0 for count in counts.values())
    return [_fill(mask, counts[episode] * trained) for mask, episode in zip(masks, episodes, strict=True)]


def constant_length(
    masks: Sequence[BoolArray], episodes: Sequence[int] = (), *, length: int
) -> list[Float32Array]:
    """1 / (length * trajectories that train) for each token (Dr. GRPO, arXiv 2503.20783).

    The sum is the mean number of trained tokens per trajectory over `length`.
    """
    if length <= 0:
        raise ValueError(f"length is {length}; expected the constant token count to divide by, above 0")
    trained = sum(bool(mask.any()) for mask in masks)
    return [_fill(mask, length * trained) for mask in masks]


def token_sum(masks: Sequence[BoolArray], episodes: Sequence[int] = ()) -> list[Float32Array]:
    """Every trained token has weight 1; the sum is their number."""
    return [_fill(mask, 1) for mask in masks]


def _fill(mask: BoolArray, denominator: int) -> Float32Array:
    return mask.astype(np.float32) / np.float32(denominator or 1)
