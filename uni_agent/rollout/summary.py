"""Figures of a step's episodes, for the metrics of a run. Missing values are counted, never 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from uni_agent.types import Episode, Group


def rollout_metrics(items: Iterable[Group | Episode]) -> dict[str, float]:
    """Summarise groups or lone episodes.

    Rewards are averaged over the scored episodes only ("rollout/unscored" counts the others), and an
    average over nothing is left out. Each end reason that occurred has its count, each named reward
    and each metric of the episodes its mean over the episodes that have it; NaN counts as missing.
    """
    episodes: list[Episode] = []
    for item in items:
        episodes += item.episodes if isinstance(item, Group) else [item]
    named: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.rewards.items():
            named.setdefault(f"reward/{name}", []).append(value)
        for name, value in episode.metrics.items():
            named.setdefault(name, []).append(value)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    lengths = [sum(int(t.sampled.sum()) for t in episode.trajectories) for episode in episodes]
    figures: dict[str, float | None] = {
        "rollout/episodes": len(episodes),
        "rollout/unscored": len(episodes) - len(rewards),
        "rollout/reward_mean": _mean(rewards),
        "rollout/truncated_ratio": _mean([float(episode.truncated) for episode in episodes]),
        "rollout/sampled_tokens_min": min(lengths, default=None),
        "rollout/sampled_tokens_max": max(lengths, default=None),
    }
    for end, count in sorted(Counter(episode.end for episode in episodes).items()):
        figures[f"rollout/end_{end}"] = count
    for name, values in named.items():
        figures[f"{name}_mean"] = _mean(values)
    return {name: float(value) for name, value in figures.items() if value is not None}


def _mean(values: Sequence[float]) -> float | None:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else None
