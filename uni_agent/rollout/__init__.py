"""Runs episodes at once and writes down their tokens.

The scribe answers an agent from a token engine and keeps the tape; the runner plays one episode and
turns what goes wrong into data; the pool runs groups for training within a bound of staleness; the
store keeps episodes on disk. Engines, environments, agents and rewards are handed in.
"""

from uni_agent.rollout.episode import ERROR_ENDS, UNSCORED_ENDS, EpisodeRunner, episode_id
from uni_agent.rollout.pool import GroupPool, RunEpisode, StepFailed, drop_stale, run_many
from uni_agent.rollout.scribe import (
    MakePolicy,
    RecordingPolicy,
    Scribe,
    ScribeFactory,
    TokenBudgetSpent,
)
from uni_agent.rollout.store import EpisodeRow, EpisodeStore
from uni_agent.rollout.summary import rollout_metrics

__all__ = [
    "ERROR_ENDS",
    "UNSCORED_ENDS",
    "EpisodeRow",
    "EpisodeRunner",
    "EpisodeStore",
    "GroupPool",
    "MakePolicy",
    "RecordingPolicy",
    "RunEpisode",
    "Scribe",
    "ScribeFactory",
    "StepFailed",
    "TokenBudgetSpent",
    "drop_stale",
    "episode_id",
    "rollout_metrics",
    "run_many",
]
