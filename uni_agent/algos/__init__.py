"""Pure functions of learning: advantages, token weights, KL estimators, losses.

Groups of episodes and the learner's scores go in; credit, weights and loss values come out. Nothing
here knows an engine, an environment or an optimizer. Advantages and weights are numpy and are
exported here; `kl` and `losses` are torch and are imported by name (`uni_agent.algos.losses`), so
that this room imports without torch.
"""

from uni_agent.algos.advantages import gae, group_counts, grpo, grpo_turns, kl_in_reward, whiten
from uni_agent.algos.checks import check_kl
from uni_agent.algos.returns import (
    TurnRewards,
    outcome_and_turns,
    outcome_only,
    outcome_or_turns,
)
from uni_agent.algos.weights import (
    TokenWeights,
    constant_length,
    episode_mean,
    sequence_mean,
    token_mean,
    token_sum,
)

__all__ = [
    "TokenWeights",
    "TurnRewards",
    "check_kl",
    "constant_length",
    "episode_mean",
    "gae",
    "group_counts",
    "grpo",
    "grpo_turns",
    "kl_in_reward",
    "outcome_and_turns",
    "outcome_only",
    "outcome_or_turns",
    "sequence_mean",
    "token_mean",
    "token_sum",
    "whiten",
]
