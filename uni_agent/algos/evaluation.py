"""Figures about finished episodes: pass@k and confidence intervals. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean and its two-sided confidence bounds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is correct, without bias (arXiv 2107.03374).

    Raises ValueError when k exceeds num_samples, where no unbiased estimate exists.
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} attempts per task, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def wilson_interval(successes: float, trials: float, z: float = 1.96) -> Interval:
    """Wilson's score interval of a proportion. Without trials there is no estimate (NaN), only [0, 1]."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return Interval(share, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def clustered_interval(per_task: Sequence[float], z: float = 1.96) -> Interval:
    """Normal interval of a mean over tasks; the attempts of one task count as one observation."""
    n = len(per_task)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan)
    mean = math.fsum(per_task) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in per_task) / (n - 1))
    return Interval(mean, mean - z * deviation / math.sqrt(n), mean + z * deviation / math.sqrt(n))
