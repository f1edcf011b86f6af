"""Trajectories with credit in, packed batches out: numpy only, no loop over tokens.

Here, and only here, it is decided which tokens train. A row holds whole trajectories, one after the
other; `segments` numbers them from 1 and 0 is padding. Masks come from lengths and from `sampled`,
never from token values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from uni_agent.algos.weights import TokenWeights, token_mean
from uni_agent.errors import RunError, UsageError
from uni_agent.protocols import Credit, TokenScores
from uni_agent.types import Batch, BoolArray, Float32Array, Group, Int32Array, Trajectory


@dataclass(frozen=True, slots=True)
class Item:
    """One trajectory with its credit. `episode` is the same number for trajectories of one episode."""

    trajectory: Trajectory
    credit: Credit
    episode: int
    score: TokenScores | None = None


def items(
    groups: Sequence[Group],
    credit: Sequence[Sequence[Sequence[Credit]]],
    scores: Sequence[Sequence[Sequence[TokenScores]]] = (),
) -> list[Item]:
    """Flatten groups, credit and scores (or none) into the trajectories that train."""
    result: list[Item] = []
    episode = 0
    for g, group in enumerate(groups):
        for e, played in enumerate(group.episodes):
            for t, trajectory in enumerate(played.trajectories):
                score = scores[g][e][t] if scores else None
                if credit[g][e][t].trained and trajectory.sampled.any():
                    result.append(Item(trajectory, credit[g][e][t], episode, score))
            episode += 1
    return result


def minibatches(all_items: Sequence[Item], size: int, *, seed: int) -> list[list[Item]]:
    """Shuffle, and cut into parts of `size` trajectories; the last may be smaller, none is lost.

    Trajectories of one episode stay together, so that a part may be a little larger.
    Raises RunError when there is nothing to train on.
    """
    if size < 1:
        raise UsageError(f"the minibatch size is {size}; expected at least 1 trajectory")
    if not all_items:
        raise RunError(f"0 trajectories are left for minibatches of {size}; nothing can be trained")
    by_episode: dict[int, list[Item]] = {}
    for item in all_items:
        by_episode.setdefault(item.episode, []).append(item)
    keys = list(by_episode)
    parts: list[list[Item]] = [[]]
    for index in np.random.default_rng(seed).permutation(len(keys)):
        if len(parts[-1]) >= size:
            parts.append([])
        parts[-1].extend(by_episode[keys[int(index)]])
    return parts


@dataclass(frozen=True, slots=True)
class Layout:
    """Where n trajectories of N tokens stand in packed rows.

    int64[n]: lengths, rows, segments (from 1). places int64[N]: the flat place of every token, in the
    order of the trajectories given. Rows are ordered by length, longest first.
    """

    num_rows: int
    width: int
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def ints(self, arrays: Sequence[Int32Array], fill: int = 0) -> Int32Array:
        """One array per trajectory -> int32[num_rows, width]."""
        packed = np.full(self.num_rows * self.width, fill, np.int32)
        if arrays:
            packed[self.places] = np.concatenate(arrays)
        return packed.reshape(self.num_rows, self.width)

    def floats(self, arrays: Sequence[Float32Array], fill: float = 0.0) -> Float32Array:
        """One array per trajectory -> float32[num_rows, width]."""
        packed = np.full(self.num_rows * self.width, fill, np.float32)
        if arrays:
            packed[self.places] = np.concatenate(arrays)
        return packed.reshape(self.num_rows, self.width)

    def gather(self, packed: Float32Array) -> list[Float32Array]:
        """[num_rows, width] -> one array per trajectory."""
        return np.split(packed.reshape(-1)[self.places], np.cumsum(self.lengths)[:-1])


def layout(lengths: Sequence[int], row_tokens: int) -> Layout:
    """Place trajectories into rows of `row_tokens`, first-fit by decreasing length, never splitting.

    One that is longer than `row_tokens` has a row of its own.
    """
    sizes = np.asarray(lengths, np.int64)
    row_of = np.zeros(len(sizes), np.int64)
    segment_of = np.zeros(len(sizes), np.int64)
    start_of = np.zeros(len(sizes), np.int64)
    used = np.zeros(len(sizes), np.int64)
    members = np.zeros(len(sizes), np.int64)
    num_rows = 0
    for i in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(used[:num_rows] + sizes[i] <= row_tokens)
        row = int(fits[0]) if len(fits) else num_rows
        num_rows = max(num_rows, row + 1)
        row_of[i], start_of[i] = row, used[row]
        used[row] += sizes[i]
        members[row] += 1
        segment_of[i] = members[row]
    order = np.argsort(-used[:num_rows], kind="stable")
    rank = np.empty(num_rows, np.int64)
    rank[order] = np.arange(num_rows)
    width = int(used.max(initial=0))
    rows = rank[row_of] if num_rows else row_of
    places = np.repeat(rows * width + start_of, sizes) + _ramps(sizes)
    return Layout(num_rows, width, sizes, rows, segment_of, places)


def _ramps(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 .. size - 1 for each size, concatenated."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - sizes, sizes)


def make_batch(
    batch_items: Sequence[Item], weights: TokenWeights = token_mean, *, row_tokens: int = 2048
) -> Batch:
    """Pack the trajectories of one optimizer step.

    Trajectories of which nothing trains take no room; if none trains, the batch has no row and the
    learner skips it. `weights` sees all trajectories of the step, those that don't train with an
    empty mask. Raises RunError for no trajectories or a number that is not finite at a trained token,
    UsageError for trajectories that must not train (truncated sampling).
    """
    if not batch_items:
        raise RunError("0 trajectories were given for a batch; at least 1 is needed")
    masks = [_mask(item) for item in batch_items]
    all_weights = weights(masks, [item.episode for item in batch_items])
    kept = [i for i, mask in enumerate(masks) if mask.any()]
    packed_items = [batch_items[i] for i in kept]
    for i in kept:
        _check(batch_items[i], masks[i])
    trajectories = [item.trajectory for item in packed_items]
    place = layout([len(t.token_ids) for t in trajectories], row_tokens)
    batch = _pack(place, trajectories, [all_weights[i] for i in kept])
    return replace(
        batch,
        advantages=place.floats([item.credit.advantages for item in packed_items]),
        ref_logprobs=_optional(place, packed_items, "ref_logprobs"),
        values=_optional(place, packed_items, "values"),
        returns=_optional(place, packed_items, "returns"),
    )


def score_batch(trajectories: Sequence[Trajectory], row_tokens: int) -> tuple[Batch, Layout]:
    """Pack trajectories for scoring: weight 1 at every sampled token, nothing refused."""
    place = layout([len(t.token_ids) for t in trajectories], row_tokens)
    masks = [_after_first(t.sampled).astype(np.float32) for t in trajectories]
    return _pack(place, trajectories, masks), place


def _pack(place: Layout, trajectories: Sequence[Trajectory], weights: Sequence[Float32Array]) -> Batch:
    shape = (place.num_rows, place.width)
    segments = np.zeros(shape, np.int32)
    segments.reshape(-1)[place.places] = np.repeat(place.segments, place.lengths)
    positions = np.zeros(shape, np.int32)
    positions.reshape(-1)[place.places] = _ramps(place.lengths)
    return Batch(
        token_ids=place.ints([t.token_ids for t in trajectories]),
        positions=positions,
        segments=segments,
        weights=place.floats(weights),
        advantages=np.zeros(shape, np.float32),
        behavior_logprobs=place.floats([t.logprobs for t in trajectories]),
        temperature=place.floats([temperatures(t) for t in trajectories], 1.0),
        versions=place.ints([t.versions for t in trajectories], -1),
    )


def temperatures(trajectory: Trajectory) -> Float32Array:
    """The temperature that each token was sampled at, float32[T]; 1 where not sampled, and for greedy."""
    result = np.ones(len(trajectory.token_ids), np.float32)
    for turn in trajectory.turns:
        result[turn.sampled[0] : turn.sampled[1]] = turn.sampling.temperature or 1.0
    return result


def _after_first(sampled: BoolArray) -> BoolArray:
    """The first token has nothing before it, so it has no logprob."""
    mask = sampled.copy()
    mask[:1] = False
    return mask


def _mask(item: Item) -> BoolArray:
    if len(item.credit.advantages) != len(item.trajectory.token_ids):
        raise ValueError(
            f"credit has {len(item.credit.advantages)} advantages for {len(item.trajectory.token_ids)} "
            f"tokens of a trajectory of {item.trajectory.agent!r}; the estimator must give one per token"
        )
    if not item.credit.trained:
        return np.zeros(len(item.trajectory.token_ids), bool)
    return _after_first(item.trajectory.sampled)


def _check(item: Item, mask: BoolArray) -> None:
    who = f"a trajectory of agent {item.trajectory.agent!r} (episode number {item.episode} of the batch)"
    for index, turn in enumerate(item.trajectory.turns):
        sampling = turn.sampling
        truncated = sampling.top_p < 1 or sampling.top_k > 0
        if sampling.temperature <= 0 or truncated or sampling.logit_bias:
            raise UsageError(
                f"turn {index} of {who} was sampled with temperature {sampling.temperature}, top_p "
                f"{sampling.top_p}, top_k {sampling.top_k}, {len(sampling.logit_bias)} logit biases; "
                "training needs temperature above 0, top_p 1, top_k 0 and no bias: sample the training "
                "episodes so, and keep the others for evaluation"
            )
    numbers = {"advantages": item.credit.advantages, "returns": item.credit.returns}
    if item.score is not None:
        numbers |= {"values": item.score.values, "ref_logprobs": item.score.ref_logprobs}
    for name, array in numbers.items():
        if array is not None and not np.isfinite(array[mask]).all():
            raise RunError(f"{name} of {who} are not finite at a token that trains; the batch is refused")


def _optional(place: Layout, packed: Sequence[Item], name: str) -> Float32Array | None:
    """A field that is there for all trajectories, or for none."""
    arrays: list[Float32Array | None] = []
    for item in packed:
        source: dict[str, Float32Array | None] = {"returns": item.credit.returns}
        if item.score is not None:
            source |= {"values": item.score.values, "ref_logprobs": item.score.ref_logprobs}
        arrays.append(source.get(name))
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) != len(arrays):
        raise ValueError(f"{len(present)} of {len(arrays)} trajectories have {name}; give all or none")
    return place.floats(present)


def truncate(trajectory: Trajectory, max_length: int) -> Trajectory:
    """Keep the first `max_length` tokens; turns behind the cut are dropped, one that is cut ends there."""
    if max_length >= len(trajectory.token_ids):
        return trajectory
    turns = [
        turn
        if turn.sampled[1] <= max_length
        else replace(
            turn,
            observation=(min(turn.observation[0], max_length), min(turn.observation[1], max_length)),
            sampled=(turn.sampled[0], max_length),
            finish="length",
        )
        for turn in trajectory.turns
        if turn.sampled[0] < max_length
    ]
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:max_length],
        sampled=trajectory.sampled[:max_length],
        logprobs=trajectory.logprobs[:max_length],
        versions=trajectory.versions[:max_length],
        turns=tuple(turns),
    )


def microbatches(batch: Batch, max_tokens: int) -> Iterator[Batch]:
    """Split rows so that rows * columns stays within `max_tokens`, and cut columns that are padding.

    A single row that is longer than that is a micro-batch of its own. Rows keep their order.
    """
    num_rows = len(batch.token_ids)
    used = (batch.segments > 0).sum(axis=1)
    start = 0
    while start < num_rows:
        width = int(used[start])
        end = start + 1
        while end < num_rows and max(width, int(used[end])) * (end + 1 - start) <= max_tokens:
            width = max(width, int(used[end]))
            end += 1
        yield _rows(batch, start, end, width)
        start = end


def _rows(batch: Batch, start: int, end: int, width: int) -> Batch:
    part = (slice(start, end), slice(0, width))
    return Batch(
        token_ids=batch.token_ids[part],
        positions=batch.positions[part],
        segments=batch.segments[part],
        weights=batch.weights[part],
        advantages=batch.advantages[part],
        behavior_logprobs=batch.behavior_logprobs[part],
        temperature=batch.temperature[part],
        versions=batch.versions[part],
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[part],
        values=None if batch.values is None else batch.values[part],
        returns=None if batch.returns is None else batch.returns[part],
    )
