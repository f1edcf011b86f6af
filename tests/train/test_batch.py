import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uni_agent.algos import episode_mean, grpo, token_mean
from uni_agent.errors import RunError, UsageError
from uni_agent.protocols import Credit, RenderedDialogue, TokenScores
from uni_agent.train import Item, demonstration, items, make_batch, microbatches, minibatches, truncate
from uni_agent.train.batch import layout, score_batch
from uni_agent.types import Group, Message, Sampling


def item(tape, mask, *, episode=0, trained=True, score=None, returns=None, **kwargs):
    t = tape(mask, **kwargs)
    advantages = np.where(t.sampled, np.arange(len(mask)) + 1.0, 0).astype(np.float32)
    return Item(t, Credit(advantages, returns=returns, trained=trained), episode, score)


def test_t05_the_mask_comes_from_sampled_and_never_from_ids(tape):
    # 2 is both the padding id of the tokenizer and its end of sequence.
    two = [
        item(tape, [0, 1, 1, 1], ids=[9, 5, 6, 2]),
        item(tape, [0, 1, 1], ids=[9, 7, 2], episode=1),
    ]
    batch = make_batch(two, row_tokens=4)
    assert batch.token_ids.tolist() == [[9, 5, 6, 2], [9, 7, 2, 0]]
    assert (batch.weights > 0).tolist() == [[False, True, True, True], [False, True, True, False]]
    assert batch.segments.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_t06_a_cut_span_keeps_its_mask(tape):
    t = tape([0] * 4 + [1] * 6)
    for length, mask in (
        (7, [0, 0, 0, 0, 1, 1, 1]),
        (4, [0] * 4),
        (5, [0, 0, 0, 0, 1]),
        (10, [0] * 4 + [1] * 6),
    ):
        cut = truncate(t, length)
        assert cut.sampled.tolist() == [bool(x) for x in mask]
        assert len(cut.token_ids) == len(cut.logprobs) == len(cut.versions) == length
    assert truncate(t, 4).turns == ()
    assert truncate(t, 7).turns[0].sampled == (4, 7)
    assert truncate(t, 7).turns[0].finish == "length"
    two = truncate(tape([0, 1, 0, 0, 1, 1]), 3)
    assert [turn.sampled for turn in two.turns] == [(1, 2)]


def test_packed_fields_stay_at_their_token(tape):
    rng = np.random.default_rng(3)
    made = []
    for n in (5, 9, 3, 8, 2, 6):
        mask = rng.random(n) < 0.6
        mask[-1] = True
        t = tape(mask, ids=rng.integers(3, 99, n), logprobs=rng.normal(size=n), version=n)
        numbers = [rng.normal(size=n).astype(np.float32) for _ in range(4)]
        score = TokenScores(numbers[0], values=numbers[1], ref_logprobs=numbers[2])
        made.append(Item(t, Credit(numbers[3], returns=numbers[0]), n, score))
    batch = make_batch(made, token_mean, row_tokens=12)
    seen = 0
    for row in range(len(batch.token_ids)):
        for segment in range(1, batch.segments[row].max() + 1):
            at = batch.segments[row] == segment
            ids = batch.token_ids[row][at].tolist()
            (one,) = [x for x in made if x.trajectory.token_ids.tolist() == ids]
            t, n = one.trajectory, len(ids)
            seen += 1
            assert batch.positions[row][at].tolist() == list(range(n))
            assert batch.advantages[row][at].tolist() == one.credit.advantages.tolist()
            assert batch.behavior_logprobs[row][at].tolist() == t.logprobs.tolist()
            assert batch.versions[row][at].tolist() == t.versions.tolist()
            assert batch.values[row][at].tolist() == one.score.values.tolist()
            assert batch.ref_logprobs[row][at].tolist() == one.score.ref_logprobs.tolist()
            assert batch.returns[row][at].tolist() == one.credit.returns.tolist()
            assert (batch.weights[row][at] > 0)[1:].tolist() == t.sampled[1:].tolist()
            assert batch.weights[row][at][0] == 0  # nothing stands before it
    assert seen == len(made)
    assert batch.weights.sum() == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), row_tokens=st.integers(1, 64))
def test_layout_never_splits_overlaps_or_overfills(lengths, row_tokens):
    place = layout(lengths, row_tokens)
    assert len(set(place.places.tolist())) == sum(lengths)
    rows = [np.unique(part // place.width) for part in np.split(place.places, np.cumsum(lengths)[:-1])]
    assert all(len(r) == 1 for r in rows)
    for row in range(place.num_rows):
        inside = [n for n, r in zip(lengths, rows, strict=True) if r[0] == row]
        assert inside
        assert sum(inside) <= row_tokens or len(inside) == 1
    assert place.num_rows <= 2 * -(-sum(lengths) // row_tokens) + sum(n > row_tokens for n in lengths)
    values = [np.full(n, i, np.float32) for i, n in enumerate(lengths)]
    back = place.gather(place.floats(values))
    assert all((a == b).all() for a, b in zip(values, back, strict=True))


@pytest.mark.parametrize("max_tokens", [1, 12, 24, 1000])
def test_microbatches_hold_every_token_once(tape, max_tokens):
    batch = make_batch([item(tape, [0] + [1] * n, episode=n) for n in (3, 11, 5, 2, 7)], row_tokens=12)
    parts = list(microbatches(batch, max_tokens))
    assert sum((p.segments > 0).sum() for p in parts) == (batch.segments > 0).sum()
    assert sum(float(p.weights.sum()) for p in parts) == pytest.approx(1)
    for part in parts:
        assert part.token_ids.size <= max_tokens or len(part.token_ids) == 1
        assert (part.segments > 0).any(axis=0).all()  # no column is padding for all
    assert len(parts) == (1 if max_tokens == 1000 else len(parts))


def test_l05_a_batch_in_which_nothing_trains_has_no_rows(tape):
    batch = make_batch([item(tape, [0, 1, 1], trained=False), item(tape, [0, 0])])
    assert batch.num_trained_tokens == 0
    assert batch.token_ids.size == 0
    assert list(microbatches(batch, 100)) == []


def test_n02_short_and_empty_data(tape):
    three = [item(tape, [0, 1], episode=i) for i in range(3)]
    (only,) = minibatches(three, 4, seed=0)
    assert len(only) == 3
    assert make_batch(only).weights.sum() == pytest.approx(1)
    five = [item(tape, [0, 1], episode=i) for i in range(5)]
    parts = minibatches(five, 4, seed=0)
    assert [len(part) for part in parts] == [4, 1]
    assert sorted(x.episode for part in parts for x in part) == [0, 1, 2, 3, 4]
    with pytest.raises(RunError, match="0 trajectories"):
        minibatches([], 4, seed=0)
    with pytest.raises(RunError, match="0 trajectories"):
        make_batch([])
    with pytest.raises(UsageError, match="size is 0"):
        minibatches(five, 0, seed=0)


def test_minibatches_are_shuffled_by_seed_and_keep_episodes_whole(tape):
    many = [item(tape, [0, 1], episode=i // 2) for i in range(20)]
    one, same, other = (minibatches(many, 4, seed=s) for s in (1, 1, 2))
    order = [[x.episode for x in part] for part in one]
    assert order == [[x.episode for x in part] for part in same]
    assert order != [[x.episode for x in part] for part in other]
    assert all(part.count(e) == 2 for part in order for e in part)


@pytest.mark.parametrize(
    "bad",
    [
        Sampling(temperature=0.0),
        Sampling(top_p=0.9),
        Sampling(top_k=5),
        Sampling(logit_bias=((3, 1.0),)),
    ],
)
def test_truncated_sampling_is_refused_where_it_would_train(tape, bad):
    with pytest.raises(UsageError, match="keep the others for evaluation"):
        make_batch([item(tape, [0, 1], sampling=bad)])
    assert make_batch([item(tape, [0, 1], sampling=bad, trained=False)]).num_trained_tokens == 0


def test_numbers_that_are_not_finite_are_refused_at_trained_tokens_only(tape):
    t = tape([0, 1, 0])
    hole = np.array([np.nan, 1.0, np.nan], np.float32)
    make_batch([Item(t, Credit(hole), 0)])
    for name in ("advantages", "returns", "values", "ref_logprobs"):
        broken = {k: np.zeros(3, np.float32) for k in ("advantages", "returns", "values", "ref_logprobs")}
        broken[name] = np.array([0, np.nan, 0], np.float32)
        score = TokenScores(np.zeros(3, np.float32), broken["values"], broken["ref_logprobs"])
        with pytest.raises(RunError, match=name):
            make_batch([Item(t, Credit(broken["advantages"], returns=broken["returns"]), 0, score)])


def test_misaligned_credit_and_half_given_fields_are_refused(tape):
    with pytest.raises(ValueError, match="2 advantages for 3 tokens"):
        make_batch([Item(tape([0, 1, 1]), Credit(np.zeros(2, np.float32)), 0)])
    with_returns = item(tape, [0, 1], returns=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="1 of 2 trajectories have returns"):
        make_batch([with_returns, item(tape, [0, 1], episode=1)])


def test_items_flatten_groups_and_number_episodes(tape, episode):
    many = episode(1.0, [tape([0, 1]), tape([0, 0, 1, 1])])
    groups = [Group("g", (many, episode(0.0))), Group("h", (episode(None), episode(0.2)))]
    flat = items(groups, grpo(groups))
    assert [x.episode for x in flat] == [0, 0, 1]  # the lone scored episode of h does not train
    batch = make_batch(flat, episode_mean)
    per_episode = {3: 0.5, 2: 0.5}
    assert batch.weights.sum() == pytest.approx(sum(per_episode.values()))
    assert sorted(set(batch.weights[batch.weights > 0].tolist())) == pytest.approx([0.5 / 3, 0.25])


def test_temperature_stands_at_each_sampled_token(tape):
    batch = make_batch([item(tape, [0, 1, 1], sampling=Sampling(temperature=0.5))], row_tokens=4)
    assert batch.temperature.tolist() == [[1.0, 0.5, 0.5]]
    greedy, _ = score_batch([tape([0, 1], sampling=Sampling(temperature=0.0))], 4)  # logprobs at 1
    assert greedy.temperature.tolist() == [[1.0, 1.0]]


def test_a_demonstration_trains_exactly_its_wanted_messages():
    said = [Message("user"), Message("assistant", "a"), Message("tool"), Message("assistant", "b")]
    dialogue = RenderedDialogue(
        [1, 2, 3, 4, 5, 6], [False, True, True, False, False, True], [0, 1, 1, 2, 2, 3]
    )
    made = demonstration(dialogue, said, trained=[False, True, False, True], number=3)
    assert [turn.sampled for turn in made.trajectory.turns] == [(1, 3), (5, 6)]
    assert [turn.message.content for turn in made.trajectory.turns] == ["a", "b"]
    assert (make_batch([made]).weights > 0).tolist() == [dialogue.sampled]
    one = demonstration(dialogue, said, trained=[False, False, False, True], number=3)
    assert (make_batch([one]).weights > 0).tolist() == [[False] * 5 + [True]]
    with pytest.raises(UsageError, match="no assistant message"):
        demonstration(dialogue, said, trained=[False] * 4, number=0)
