from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from uni_agent.algos import group_counts, grpo, grpo_turns, outcome_and_turns
from uni_agent.errors import ConfigError
from uni_agent.types import Episode, Group, Task


def values(credit_of_group):
    """One advantage per episode (the sampled tokens of its only tape agree), None if not trained."""
    result = []
    for (credit,) in credit_of_group:
        assert len(set(credit.advantages[1:].tolist())) == 1
        assert credit.advantages[0] == 0
        result.append(float(credit.advantages[1]) if credit.trained else None)
    return result


def both(groups, **kwargs):
    """grpo, and grpo_turns, which must agree with it where each episode has one turn."""
    a = grpo(groups, **kwargs)
    b = grpo_turns(groups, **kwargs)
    for x, y in zip(a, b, strict=True):
        assert values(x) == pytest.approx(values(y))
    return [values(x) for x in a]


def test_a06_invalid_reward_is_left_out_of_statistics_and_training(group):
    good = group([0.0, 1.0], id="good")
    for missing in (None, float("nan")):
        first, dead, neighbour = both(
            [group([1, missing, 0, 1]), group([missing] * 3), good], normalize_std=False
        )
        assert first[1] is None
        assert [first[0], first[2], first[3]] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
        assert dead == [None, None, None]
        assert neighbour == pytest.approx([-0.5, 0.5])
    (scaled,) = both([group([1, None, 0, 1])], normalize_std=True)
    assert [scaled[0], scaled[2], scaled[3]] == pytest.approx([0.57735, -1.1547, 0.57735], abs=1e-5)
    assert group_counts([group([None] * 3), good])["algos/groups_unscored"] == 1


@pytest.mark.parametrize("rewards", [[1, 1, 1, 1], [0, 0, 0, 0], [0.3, 0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_a07_zero_variance_group_trains_nothing(group, rewards, normalize_std):
    credit = grpo([group(rewards)], normalize_std=normalize_std)[0]
    assert all(not c.trained and np.abs(c.advantages).max() < 1e-6 for (c,) in credit)
    assert group_counts([group(rewards)])["algos/groups_zero_variance"] == 1


def test_a07_small_true_differences_are_not_noise(group):
    (small,) = both([group([1e-5, 2e-5])], normalize_std=True)
    assert small == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_a08_lone_sample_has_no_advantage(group):
    lone, full = both([group([1.0]), group([1.0, 0.0])], normalize_std=False)
    assert lone == [None]
    assert full == pytest.approx([0.5, -0.5])
    assert both([group([1.0])], normalize_std=True) == [[None]]
    assert group_counts([group([1.0])])["algos/groups_lone"] == 1


def test_a08_two_turns_of_one_episode_are_no_group(tape, episode):
    lone = Group("g", (episode(1.0, [tape([0, 1, 0, 1], turn_rewards=[0.2, 1.0])]),))
    ((credit,),) = grpo_turns([lone])[0]
    assert not credit.trained


def test_a09_partly_failed_groups_do_not_mix(group, episode):
    g0 = group([1.0, 3.0])
    g1 = Group("g1", (episode(5.0), episode(9.0, end="sandbox_error")))
    full, left = both([g0, g1], normalize_std=False)
    assert full == pytest.approx([-1.0, 1.0])
    assert left == [None, None]
    full, tail = both([group([1.0, 2.0]), group([3.0])], normalize_std=False)
    assert full == pytest.approx([-0.5, 0.5])
    assert tail == [None]


def test_a10_any_order_gives_the_same_advantage(group):
    assert both([group([1.0, 1.0], "A"), group([0.0, 0.0], "B")]) == [[None, None], [None, None]]
    rewards = [0.1, 0.9, 0.4, 0.2]
    (straight,) = both([group(rewards)])
    order = [2, 0, 3, 1]
    (shuffled,) = both([group([rewards[i] for i in order])])
    assert shuffled == pytest.approx([straight[i] for i in order])


def test_a11_deviation_is_unbiased(group):
    (scaled,) = both([group([1, 2, 3, 4])], normalize_std=True)
    assert scaled == pytest.approx([-1.1618950, -0.3872983, 0.3872983, 1.1618950], abs=1e-6)
    (centred,) = both([group([1, 2, 3, 4])], normalize_std=False)
    assert centred == pytest.approx([-1.5, -0.5, 0.5, 1.5])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=9), normalize_std=st.booleans())
def test_grpo_against_a_short_reference(group, rewards, normalize_std):
    got = values(grpo([group(rewards)], normalize_std=normalize_std)[0])
    x = np.array(rewards, np.float64)
    deviation = x.std(ddof=1)
    if None in got:
        assert deviation <= 1e-5 * np.abs(x).max()
        return
    wanted = (x - x.mean()) / (deviation if normalize_std else 1)
    assert got == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-4)


def test_end_reasons_decide_who_counts_and_who_trains(episode):
    group = Group(
        "g",
        (
            episode(1.0),
            episode(0.0),
            episode(0.5, end="timeout"),  # mask: counts, does not train
            episode(100.0, end="cancelled"),  # drop: does not count
            episode(100.0, end="engine_error"),  # retry: does not count
            episode(1.0, end="max_turns"),  # bootstrap: trains as it is
            episode(0.0, trainable=False),
        ),
    )
    ((a, b, masked, dropped, failed, cut, foreign),) = both([group], normalize_std=False)
    assert (masked, dropped, failed, foreign) == (None, None, None, None)
    assert [a, b, cut] == pytest.approx([0.5, -0.5, 0.5])  # mean of 1, 0, .5, 1, 0
    assert group_counts([group])["algos/episodes_masked"] == 2


def test_an_episode_counts_once_however_many_tapes_it_has(tape, episode):
    many = episode(1.0, [tape([0, 1]), tape([0, 0, 1, 1]), tape([1])])
    group = Group("g", (many, episode(0.0, [tape([0, 1])])))
    credit = grpo([group], normalize_std=False)[0]
    assert [c.advantages.tolist() for c in credit[0]] == [[0, 0.5], [0, 0, 0.5, 0.5], [0.5]]
    assert credit[1][0].advantages.tolist() == [0, -0.5]


def test_grpo_turns_gives_every_token_of_a_turn_its_turns_advantage(tape, episode):
    good = episode(1.0, [tape([0, 1, 1, 0, 1], turn_rewards=[0.5, 1.0])])
    bad = episode(0.0, [tape([0, 1, 0, 0, 1], turn_rewards=[0.0, 0.0])])
    credit = grpo_turns([Group("g", (good, bad))], discount=0.5, normalize_std=False)[0]
    returns = np.array([0.5 + 0.5, 1.0, 0.0, 0.0])
    wanted = returns - returns.mean()
    assert credit[0][0].advantages.tolist() == pytest.approx([0, wanted[0], wanted[0], 0, wanted[1]])
    assert credit[1][0].advantages.tolist() == pytest.approx([0, wanted[2], 0, 0, wanted[3]])


def test_grpo_turns_terminal_reward_is_discounted_per_turn_across_tapes(tape, episode):
    split = episode(1.0, [tape([0, 1]), tape([0, 0, 1])])
    whole = episode(0.0, [tape([0, 1, 0, 1])])
    credit = grpo_turns([Group("g", (split, whole))], discount=0.5, normalize_std=False)[0]
    wanted = np.array([0.5, 1, 0, 0]) - 0.375
    assert credit[0][0].advantages[1] == pytest.approx(wanted[0])
    assert credit[0][1].advantages[2] == pytest.approx(wanted[1])


def test_outcome_and_turns_adds_both(tape, episode):
    both_kinds = episode(1.0, [tape([0, 1, 0, 1], turn_rewards=[0.25, None])])
    assert outcome_and_turns(both_kinds) == [[0.25, 1.0]]
    estimator = partial(grpo_turns, rewards=outcome_and_turns, normalize_std=False)
    other = episode(0.0, [tape([0, 1])])
    credit = estimator([Group("g", (both_kinds, other))])[0]
    wanted = np.array([1.25, 1.0, 0.0]) - 0.75
    assert credit[0][0].advantages.tolist() == pytest.approx([0, wanted[0], 0, wanted[1]])


def test_an_episode_without_tapes_does_not_disturb(group):
    empty = Episode("x", Task("t", ()), (), "engine_error")
    whole = group([1.0, 0.0])
    credit = grpo([Group("g", (*whole.episodes, empty))], normalize_std=False)[0]
    assert credit[2] == []
    assert credit[0][0].advantages[1] == pytest.approx(0.5)


def turn_reference(returns, *, normalize_std=True, negative_scale=1.0):
    """Per-turn baseline in a few lines: `returns` is one list per episode, in the order of its turns."""
    numbers = range(max(len(r) for r in returns))
    means = [np.mean([r[k] for r in returns if k < len(r)]) for k in numbers]
    less = [[x - means[k] for k, x in enumerate(r)] for r in returns]
    deviation = np.std([x for row in less for x in row], ddof=1) if normalize_std else 1.0
    return [[x / deviation * (negative_scale if x < 0 else 1.0) for x in row] for row in less]


def turn_values(credit_of_group, episodes):
    """The advantage at the first sampled token of each turn; all others of the turn must agree."""
    rows = []
    for (credit,), episode in zip(credit_of_group, episodes, strict=True):
        spans = [turn.sampled for turn in episode.trajectories[0].turns]
        parts = [credit.advantages[a:b].tolist() for a, b in spans]
        assert all(len(set(part)) == 1 for part in parts)
        rows.append([part[0] for part in parts])
    return rows


def turns_group(tape, episode, rewards):
    """One episode per list of step rewards; each turn has two sampled tokens."""
    return Group(
        "g",
        tuple(
            episode(r[-1], [tape([0, 1, 1] * len(r), turn_rewards=r)], id=f"g/{i}")
            for i, r in enumerate(rewards)
        ),
    )


STEPS = [[0.0, 0.5, 1.0], [0.25], [0.0, 0.0], [0.75, 0.125, 0.0, 0.5]]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("negative_scale", [1.0, 0.25, 0.0])
def test_turn_baseline_against_a_short_reference(tape, episode, normalize_std, negative_scale):
    group = turns_group(tape, episode, STEPS)
    returns = [[sum(0.5 ** (j - i) * r[j] for j in range(i, len(r))) for i in range(len(r))] for r in STEPS]
    got = grpo_turns(
        [group],
        discount=0.5,
        baseline="turn",
        normalize_std=normalize_std,
        negative_scale=negative_scale,
    )[0]
    wanted = turn_reference(returns, normalize_std=normalize_std, negative_scale=negative_scale)
    for row, expected in zip(turn_values(got, group.episodes), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)
    lone = turn_values(got, group.episodes)[3][3]  # the only fourth turn: nobody to compare with
    assert lone == pytest.approx(0, abs=1e-12)


def test_turn_baseline_does_not_depend_on_the_order_of_episodes(tape, episode):
    order = [2, 0, 3, 1]
    straight = turns_group(tape, episode, STEPS)
    shuffled = Group("g", tuple(straight.episodes[i] for i in order))
    a = turn_values(grpo_turns([straight], baseline="turn")[0], straight.episodes)
    b = turn_values(grpo_turns([shuffled], baseline="turn")[0], shuffled.episodes)
    for position, i in enumerate(order):
        assert b[position] == pytest.approx(a[i], abs=1e-6)


@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2, 0.3, 0.3], [1 / 3] * 7, [0.7] * 11, [0.0] * 4])
def test_a07_turn_baseline_takes_no_float_noise_for_a_difference(group, tape, episode, rewards):
    for normalize_std in (True, False):
        estimator = partial(grpo_turns, baseline="turn", normalize_std=normalize_std)
        assert values(estimator([group(rewards)])[0]) == [None] * len(rewards)
        longer = turns_group(tape, episode, [[0.0] * (i % 3) + [r] for i, r in enumerate(rewards)])
        assert not any(c.trained for (c,) in estimator([longer])[0])


def test_a07_turn_baseline_keeps_small_true_differences(group):
    small = values(grpo_turns([group([1e-5, 2e-5])], baseline="turn")[0])
    assert small == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_negative_scale_leaves_what_worked_as_it_is(group):
    plain = values(grpo_turns([group([0.0, 0.25, 1.0])])[0])
    scaled = values(grpo_turns([group([0.0, 0.25, 1.0])], negative_scale=0.5)[0])
    assert scaled == pytest.approx([a * 0.5 if a < 0 else a for a in plain])
    assert min(plain) < 0 < max(plain)


def test_an_unknown_baseline_is_refused(group):
    with pytest.raises(ConfigError, match="baseline is 'mean'; expected 'group' or 'turn'"):
        grpo_turns([group([0.0, 1.0])], baseline="mean")


def test_a07_float32_noise_is_no_difference(group):
    rewards = [0.1, float(np.float32(0.1)), 0.1]
    assert values(grpo([group(rewards)])[0]) == [None] * 3


def test_a08_a_group_without_a_score_is_not_a_lone_one(group):
    counts = group_counts([group([None] * 3), group([1.0, None])])
    assert (counts["algos/groups_unscored"], counts["algos/groups_lone"]) == (1, 1)


def test_a06_a_step_reward_that_is_no_number_makes_the_episode_invalid(tape, episode):
    broken = episode(1.0, [tape([0, 1, 0, 1], turn_rewards=[float("nan"), 1.0])])
    group = Group("g", (broken, *(episode(r) for r in (0.0, 1.0))))
    credit = grpo([group], normalize_std=False)[0]
    assert [c.trained for (c,) in credit] == [False, True, True]
    assert credit[1][0].advantages[1] == pytest.approx(-0.5)


def test_turns_of_two_agents_are_neither_chained_nor_compared(tape, episode):
    """The judge's turns come after another number of the main agent's in each episode."""
    two = episode(
        1.0, [tape([1, 0, 1], turn_rewards=[1.0, 2.0]), tape([1], agent="judge", turn_rewards=[4.0])]
    )
    one = episode(0.0, [tape([1], turn_rewards=[0.0]), tape([1], agent="judge", turn_rewards=[1.0])])
    credit = grpo_turns([Group("g", (two, one))], discount=0.5, baseline="turn", normalize_std=False)[0]
    assert credit[0][0].advantages.tolist() == pytest.approx([1.0, 0, 0])  # (1 + 2 / 2) against 0; alone
    assert credit[0][1].advantages.tolist() == pytest.approx([1.5])
    assert [c.advantages.tolist() for c in credit[1]] == [pytest.approx([-1.0]), pytest.approx([-1.5])]
