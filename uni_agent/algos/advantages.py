"""Advantage estimators: groups of episodes and the learner's scores in, credit per trajectory out.

Every estimator has the signature `protocols.Advantage` once its keywords are set with
`functools.partial`. Statistics are float64, deviations unbiased (n - 1). Groups are the Group
objects: nothing is ever grouped by position. `types.TRAINING_POLICY` decides per end reason who
trains and who counts in the group; an episode counts once, however many trajectories it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from uni_agent.algos.returns import (
    Float64Array,
    TurnRewards,
    centre,
    chains,
    discounted_sum,
    outcome_or_turns,
    scored,
    trainable,
    turn_returns,
)
from uni_agent.errors import ConfigError
from uni_agent.protocols import Credit, TokenScores
from uni_agent.types import BoolArray, Episode, Float32Array, Group, Trajectory

GroupScores = Sequence[Sequence[Sequence[TokenScores]]]


def grpo(
    groups: Sequence[Group], scores: GroupScores = (), *, normalize_std: bool = True
) -> list[list[list[Credit]]]:
    """Compare each episode's reward with its group's mean (GRPO, arXiv 2402.03300).

    Every sampled token of an episode gets the episode's advantage. Groups without a difference (all
    rewards equal, or fewer than two scored episodes) have advantage 0 and do not train.
    `normalize_std=False` is the form of Dr. GRPO (arXiv 2503.20783).
    """
    return [_grpo_group(group, normalize_std=normalize_std) for group in groups]


def _grpo_group(group: Group, *, normalize_std: bool) -> list[list[Credit]]:
    members = [i for i, episode in enumerate(group.episodes) if scored(episode)]
    advantages = centre(
        [float(group.episodes[i].reward or 0.0) for i in members], normalize_std=normalize_std
    )
    credit = [_nothing(episode) for episode in group.episodes]
    if advantages is None:
        return credit
    for i, advantage in zip(members, advantages, strict=True):
        episode = group.episodes[i]
        if trainable(episode):
            credit[i] = [
                Credit(np.where(t.sampled, advantage, 0.0).astype(np.float32)) for t in episode.trajectories
            ]
    return credit


def grpo_turns(
    groups: Sequence[Group],
    scores: GroupScores = (),
    *,
    discount: float = 1.0,
    normalize_std: bool = True,
    baseline: Literal["group", "turn"] = "group",
    negative_scale: float = 1.0,
    rewards: TurnRewards = outcome_or_turns,
) -> list[list[list[Credit]]]:
    """As `grpo`, with credit per turn: the return of each turn, compared with the group's other turns.

    The return of a turn is the sum of its own and later turns' rewards, discounted per turn. Every
    sampled token of a turn gets its turn's advantage. The baseline is the mean over all turns of the
    group, or with "turn" over the same agent's turns of the same number: what could still be reached by
    those who had come that far; a turn that nobody else reached has advantage 0. The deviation is over all of
    the group's turns, unbiased. `negative_scale` multiplies negative advantages at the end: below 1,
    what worked teaches more than what failed, and larger steps stay stable (arXiv 2506.20520).
    """
    if baseline not in ("group", "turn"):
        raise ConfigError(f"baseline is {baseline!r}; expected 'group' or 'turn'")
    credit: list[list[list[Credit]]] = []
    for group in groups:
        members = [i for i, episode in enumerate(group.episodes) if scored(episode)]
        returns = [turn_returns(group.episodes[i], rewards, discount) for i in members]
        flat = [array for episode in returns for array in episode]
        advantages = None
        if len(members) > 1 and flat:
            values = np.concatenate(flat)
            size = float(np.abs(values).max(initial=0.0))
            if baseline == "turn":
                values = _less_mean_of(values, _turn_keys([group.episodes[i] for i in members]))
            advantages = centre(values, normalize_std=normalize_std, size=size)
            if advantages is not None:
                advantages = np.where(advantages < 0, negative_scale * advantages, advantages)
        rows = [_nothing(episode) for episode in group.episodes]
        offset = 0
        for i in members if advantages is not None else ():
            episode = group.episodes[i]
            num_turns = episode.num_turns
            if trainable(episode):
                assert advantages is not None
                rows[i] = _per_turn(episode, advantages[offset : offset + num_turns])
            offset += num_turns
        credit.append(rows)
    return credit


def _turn_keys(episodes: Sequence[Episode]) -> npt.NDArray[np.int64]:
    """For each turn, in order, a number that says whose turn it is and which of that agent's."""
    known: dict[tuple[str, int], int] = {}
    keys: list[int] = []
    for episode in episodes:
        played: Counter[str] = Counter()
        for trajectory in episode.trajectories:
            for _ in trajectory.turns:
                place = (trajectory.agent, played[trajectory.agent])
                keys.append(known.setdefault(place, len(known)))
                played[trajectory.agent] += 1
    return np.asarray(keys, np.int64)


def _less_mean_of(values: Float64Array, keys: npt.NDArray[np.int64]) -> Float64Array:
    """Subtract from each value the mean of those with the same key; lone ones become 0."""
    means = np.bincount(keys, values) / np.maximum(np.bincount(keys), 1)
    return values - means[keys]


def _per_turn(episode: Episode, advantages: Float64Array) -> list[Credit]:
    credit: list[Credit] = []
    turn_index = 0
    for trajectory in episode.trajectories:
        array = np.zeros(len(trajectory.token_ids), np.float32)
        for turn in trajectory.turns:
            array[turn.sampled[0] : turn.sampled[1]] = advantages[turn_index]
            turn_index += 1
        credit.append(Credit(array))
    return credit


def gae(
    groups: Sequence[Group],
    scores: GroupScores,
    *,
    discount: float = 1.0,
    lam: float = 1.0,
    unit: Literal["turn", "token"] = "turn",
    rewards: TurnRewards = outcome_or_turns,
    kl_coef: float = 0.0,
    whitening: bool = True,
) -> list[list[list[Credit]]]:
    """Generalised advantage estimation (arXiv 1506.02438) over the sampled tokens only.

    Observation tokens cost no decay and their values are never read. With `unit="turn"`, `discount`
    and `lam` apply where one turn ends and the next begins, and are 1 within a turn; with "token"
    they apply at every sampled token. A turn's reward stands at its last token. An episode that a
    limit cut short continues with `TokenScores.bootstrap`; one that ended continues with 0, even if
    it reached a limit at the same moment. `returns` are advantages + values, before whitening.
    `kl_coef` subtracts the KL to the reference from the reward, see `kl_in_reward`.
    """
    if unit not in ("turn", "token"):
        raise ConfigError(f"unit is {unit!r}; expected 'turn' or 'token'")
    credit = [[_nothing(episode) for episode in group.episodes] for group in groups]
    strands: list[_Strand] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            if trainable(episode):
                own = _episode_scores(scores, g, e, episode)
                strands.extend(_strands(episode, own, (g, e), rewards(episode), kl_coef))
    if not strands:
        return credit
    advantages = _gae_matrix(strands, discount=discount, lam=lam, per_token=unit == "token")
    flat = np.concatenate([row[: len(s.values)] for row, s in zip(advantages, strands, strict=True)])
    trained = whiten(flat) if whitening else flat
    offset = 0
    for row, strand in zip(advantages, strands, strict=True):
        n = len(strand.values)
        g, e = strand.episode
        _spread(groups[g].episodes[e], strand, trained[offset : offset + n], row[:n], credit[g][e])
        offset += n
    return credit


@dataclass(frozen=True, slots=True)
class _Strand:
    """The n sampled tokens of one chain, in order: float64[n] values and rewards, bool[n] turn ends."""

    episode: tuple[int, int]
    chain: list[int]
    values: Float64Array
    rewards: Float64Array
    ends: BoolArray
    bootstrap: float


def _strands(
    episode: Episode,
    scores: Sequence[TokenScores],
    where: tuple[int, int],
    earned: list[list[float]],
    kl_coef: float,
) -> list[_Strand]:
    strands: list[_Strand] = []
    for chain in chains(episode):
        parts = [_token_rewards(episode.trajectories[i], scores[i], earned[i], kl_coef) for i in chain]
        if any(len(values) for values, _, _ in parts):
            strand = _Strand(
                where,
                chain,
                values=np.concatenate([values for values, _, _ in parts]),
                rewards=np.concatenate([rewards for _, rewards, _ in parts]),
                ends=np.concatenate([ends for _, _, ends in parts]),
                bootstrap=scores[chain[-1]].bootstrap if episode.truncated else 0.0,
            )
            strands.append(strand)
    return strands


def _token_rewards(
    trajectory: Trajectory, score: TokenScores, earned: list[float], kl_coef: float
) -> tuple[Float64Array, Float64Array, BoolArray]:
    """Values, rewards and turn ends at the sampled tokens of one trajectory."""
    if score.values is None:
        raise ConfigError("gae needs values, and the learner has no critic; give it one, or use grpo")
    length = len(trajectory.token_ids)
    rewards = np.zeros(length, np.float64)
    ends = np.zeros(length, bool)
    if kl_coef:
        rewards += kl_in_reward(trajectory, score, kl_coef)
    for turn, reward in zip(trajectory.turns, earned, strict=True):
        # A turn without tokens has no place of its own: its reward goes to the token before it.
        rewards[max(turn.sampled[1] - 1, 0)] += reward
        if turn.sampled[1] > turn.sampled[0]:
            ends[turn.sampled[1] - 1] = True
    sampled = trajectory.sampled
    return score.values[sampled].astype(np.float64), rewards[sampled], ends[sampled]


def _gae_matrix(strands: Sequence[_Strand], *, discount: float, lam: float, per_token: bool) -> Float64Array:
    """Advantages float64[strands, longest]; 0 behind a strand's end."""
    longest = max(len(strand.values) for strand in strands)
    deltas = np.zeros((len(strands), longest))
    decay = np.zeros((len(strands), longest))
    for row, strand in enumerate(strands):
        n = len(strand.values)
        step = np.where(strand.ends | per_token, discount, 1.0)
        following = np.append(strand.values[1:], strand.bootstrap)
        deltas[row, :n] = strand.rewards + step * following - strand.values
        decay[row, :n] = step * np.where(strand.ends | per_token, lam, 1.0)
    return discounted_sum(deltas, decay)


def _spread(
    episode: Episode, strand: _Strand, advantages: Float64Array, raw: Float64Array, credit: list[Credit]
) -> None:
    """Put a strand's numbers back at the sampled places of its trajectories."""
    offset = 0
    for index in strand.chain:
        sampled = episode.trajectories[index].sampled
        n = int(sampled.sum())
        part = slice(offset, offset + n)
        placed = np.zeros(len(sampled), np.float32)
        placed[sampled] = advantages[part]
        returns = np.zeros(len(sampled), np.float32)
        returns[sampled] = raw[part] + strand.values[part]
        credit[index] = Credit(placed, returns=returns)
        offset += n


def whiten(values: Float64Array) -> Float64Array:
    """Mean 0 and unbiased deviation 1, over exactly the values given (trained tokens, no padding).

    Fewer than two values are left as they are; equal values become 0.
    """
    if len(values) < 2:
        return values
    centred = centre(values, normalize_std=True)
    return np.zeros_like(values) if centred is None else centred


def kl_in_reward(trajectory: Trajectory, score: TokenScores, coef: float) -> Float32Array:
    """-coef * (behaviour logprob - reference logprob) at sampled tokens, 0 at all others: float32[T]."""
    if score.ref_logprobs is None:
        raise ConfigError(
            f"the KL coefficient of the reward is {coef}, and the learner has no reference model; "
            "give it one, or set the coefficient to 0"
        )
    difference = np.where(trajectory.sampled, trajectory.logprobs - score.ref_logprobs, 0.0)
    return (-coef * difference).astype(np.float32)


def group_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Count what a group-relative estimator cannot learn from, for the step's metrics."""
    rewards = [[float(e.reward or 0.0) for e in group.episodes if scored(e)] for group in groups]
    episodes = [episode for group in groups for episode in group.episodes]
    return {
        "algos/groups": float(len(groups)),
        "algos/groups_unscored": float(sum(not r for r in rewards)),
        "algos/groups_lone": float(sum(len(r) == 1 for r in rewards)),
        "algos/groups_zero_variance": float(
            sum(len(r) > 1 and centre(r, normalize_std=False) is None for r in rewards)
        ),
        "algos/episodes_unscored": float(sum(not scored(episode) for episode in episodes)),
        "algos/episodes_masked": float(sum(scored(e) and not trainable(e) for e in episodes)),
    }


def _nothing(episode: Episode) -> list[Credit]:
    return [
        Credit(np.zeros(len(t.token_ids), np.float32), returns=None, trained=False)
        for t in episode.trajectories
    ]


def _episode_scores(
    scores: GroupScores, group: int, episode_index: int, episode: Episode
) -> Sequence[TokenScores]:
    if len(scores) <= group:
        raise ConfigError("gae needs the learner's scores (values); call learner.score first")
    own = scores[group][episode_index]
    for trajectory, score in zip(episode.trajectories, own, strict=True):
        for name in ("values", "ref_logprobs"):
            array = score.values if name == "values" else score.ref_logprobs
            if array is not None and len(array) != len(trajectory.token_ids):
                raise ValueError(
                    f"episode {episode.id}: scores have {len(array)} {name} for "
                    f"{len(trajectory.token_ids)} tokens; the learner must return one per token"
                )
    return own
