import numpy as np
import pytest

from uni_agent.algos import gae, kl_in_reward, whiten
from uni_agent.errors import ConfigError
from uni_agent.protocols import TokenScores
from uni_agent.types import Group


def run(tapes_values, *, reward=0.0, end="done", episode, bootstrap=0.0, ref=None, **kwargs):
    """gae over one episode of (tape, values) pairs, unwhitened unless said otherwise."""
    tapes = [t for t, _ in tapes_values]
    scores = [
        TokenScores(
            np.zeros(len(t.token_ids), np.float32),
            values=np.asarray(v, np.float32),
            ref_logprobs=None if ref is None else np.asarray(ref, np.float32),
            bootstrap=bootstrap,
        )
        for t, v in tapes_values
    ]
    kwargs.setdefault("whitening", False)
    return gae([Group("g", (episode(reward, tapes, end=end),))], [[scores]], **kwargs)[0][0]


def test_a01_only_sampled_tokens_take_part(tape, episode):
    for observed in ([9, 9], [-3, 1e6], [9, 9] + [7] * 50):
        mask = [1, 1] + [0] * len(observed) + [1]
        (credit,) = run(
            [(tape(mask), [0.5, 0.4, *observed, 0.2])],
            reward=1.0,
            episode=episode,
            discount=0.9,
            lam=0.8,
            unit="token",
        )
        sampled = credit.advantages[np.array(mask, bool)]
        assert sampled.tolist() == pytest.approx([0.11632, 0.356, 0.8], abs=1e-6)
        assert (credit.advantages[~np.array(mask, bool)] == 0).all()
        assert credit.returns[np.array(mask, bool)].tolist() == pytest.approx([0.61632, 0.756, 1.0], abs=1e-6)


def test_a03_whitening_uses_trained_tokens_only():
    assert whiten(np.array([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1, 0, 1])
    assert whiten(np.array([5.0])).tolist() == [5.0]
    assert whiten(np.array([])).tolist() == []
    assert whiten(np.array([2.0, 2.0])).tolist() == [0, 0]


def test_a03_whitening_in_gae_covers_the_batch_and_no_padding(tape, episode):
    tapes = [(tape([0, 1, 1, 1]), np.zeros(4)), (tape([0, 1], agent="other"), np.zeros(2))]
    first, second = run(tapes, reward=1.0, episode=episode, discount=0.5, unit="token", whitening=True)
    raw = np.array([0.25, 0.5, 1.0, 1.0])
    wanted = (raw - raw.mean()) / raw.std(ddof=1)
    assert first.advantages.tolist() == pytest.approx([0, *wanted[:3]], abs=1e-6)
    assert second.advantages.tolist() == pytest.approx([0, wanted[3]], abs=1e-6)
    assert first.returns.tolist() == pytest.approx([0, 0.25, 0.5, 1.0])  # before whitening


def test_a04_discount_per_turn_or_per_token(tape, episode):
    mask = [0, 1, 1, 1, 0, 1, 1]
    zeros = np.zeros(7)

    def sampled(credit):
        return credit[0].advantages[np.array(mask, bool)].tolist()

    final = run([(tape(mask), zeros)], reward=1.0, episode=episode, discount=0.5)
    assert sampled(final) == pytest.approx([0.5, 0.5, 0.5, 1, 1])
    turns = tape(mask, turn_rewards=[0.2, 1.0])
    stepwise = run([(turns, zeros)], reward=1.2, episode=episode, discount=0.5)
    assert sampled(stepwise) == pytest.approx([0.7, 0.7, 0.7, 1, 1])
    tokens = run([(tape(mask), zeros)], reward=1.0, episode=episode, discount=0.5, unit="token")
    assert sampled(tokens) == pytest.approx([0.0625, 0.125, 0.25, 0.5, 1])


@pytest.mark.parametrize("unit", ["turn", "token"])
@pytest.mark.parametrize(
    "case",
    [
        ("done", 1.0, 1.0, [-0.5, -0.6]),
        ("max_turns", 1.0, 1.0, [0.3, 0.2]),
        ("done", 0.9, 0.95, [-0.473, -0.6]),
        ("context_full", 0.9, 0.95, [0.1426, 0.12]),
    ],
)
def test_a05_truncated_bootstraps_and_terminated_does_not(tape, episode, unit, case):
    end, discount, lam, wanted = case
    # Terminated and truncated at once is "done": the bootstrap is there and must not be read.
    (credit,) = run(
        [(tape([1, 0, 1]), [0.5, 9, 0.6])],
        episode=episode,
        end=end,
        bootstrap=0.8,
        discount=discount,
        lam=lam,
        unit=unit,
    )
    assert credit.advantages[[0, 2]].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a12_kl_in_reward_counts_sampled_tokens_only(tape, episode):
    t = tape([1, 0, 0, 1])
    ref = [-1.0, -1.0, -1.0, -1.0]  # behaviour logprobs are 0: KL 1 everywhere
    (credit,) = run([(t, np.zeros(4))], episode=episode, ref=ref, kl_coef=1.0, discount=0.9, unit="token")
    assert credit.returns[0] == pytest.approx(-1.9)
    assert credit.returns[3] == pytest.approx(-1.0)
    score = TokenScores(np.zeros(4, np.float32), ref_logprobs=np.array([-1, np.nan, 5, -1], np.float32))
    assert kl_in_reward(t, score, 1.0).tolist() == [-1, 0, 0, -1]


def test_q09_kl_in_reward_amount(tape, episode):
    (credit,) = run([(tape([1]), [0.0])], reward=1.0, episode=episode, ref=[-1.0], kl_coef=0.1)
    assert credit.returns[0] == pytest.approx(0.9)


def test_kl_in_reward_without_reference_is_refused(tape, episode):
    with pytest.raises(ConfigError, match="no reference"):
        run([(tape([1]), [0.0])], reward=1.0, episode=episode, kl_coef=0.1)


def test_gae_without_values_is_refused(tape, episode):
    group = Group("g", (episode(1.0, [tape([1])]),))
    with pytest.raises(ConfigError, match="critic"):
        gae([group], [[[TokenScores(np.zeros(1, np.float32))]]])
    with pytest.raises(ConfigError, match="score"):
        gae([group], [])


def test_a_restarted_tape_continues_the_one_before(tape, episode):
    whole = run(
        [(tape([1, 1, 0, 1]), [0.5, 0.4, 0, 0.2])], reward=1.0, episode=episode, lam=0.8, discount=0.9
    )
    parts = run(
        [(tape([1, 1]), [0.5, 0.4]), (tape([0, 0, 1]), [7, 7, 0.2])],
        reward=1.0,
        episode=episode,
        lam=0.8,
        discount=0.9,
    )
    assert parts[0].advantages.tolist() == pytest.approx(whole[0].advantages[:2].tolist())
    assert parts[1].advantages[2] == pytest.approx(whole[0].advantages[3])


def test_masked_and_unscored_episodes_stay_out_of_whitening(tape, episode):
    def scored(t):
        return [TokenScores(np.zeros(3, np.float32), values=np.zeros(3, np.float32))]

    kept = [episode(r, [tape([0, 1, 1])]) for r in (0.0, 1.0)]
    lost = [episode(None), episode(50.0, end="timeout"), episode(50.0, end="tool_error")]
    group = Group("g", tuple(kept + lost))
    credit = gae([group], [[scored(e) for e in group.episodes]])[0]
    wanted = np.array([0, 0, 1, 1]) - 0.5
    wanted = wanted / wanted.std(ddof=1)
    assert credit[0][0].advantages[1:].tolist() == pytest.approx(wanted[:2].tolist())
    assert credit[1][0].advantages[1:].tolist() == pytest.approx(wanted[2:].tolist())
    assert all(not credit[i][0].trained for i in (2, 3, 4))


def test_gae_against_a_float64_loop(tape, episode):
    rng = np.random.default_rng(0)
    mask = rng.random(60) < 0.6
    values = rng.normal(size=60)
    t = tape(mask)
    rewards = rng.normal(size=len(t.turns))
    t = tape(mask, turn_rewards=rewards.tolist())
    for unit in ("turn", "token"):
        (credit,) = run(
            [(t, values)], reward=0.0, end="max_tokens", bootstrap=0.3, episode=episode,
            discount=0.9, lam=0.7, unit=unit,
        )  # fmt: skip
        value32 = values.astype(np.float32).astype(np.float64)
        advantage, following, wanted = 0.0, 0.3, np.zeros(60)
        ends = {turn.sampled[1] - 1: r for turn, r in zip(t.turns, rewards, strict=True)}
        for i in reversed(np.flatnonzero(mask)):
            g, l = (0.9, 0.7) if unit == "token" or i in ends else (1.0, 1.0)  # noqa: E741
            delta = ends.get(i, 0.0) + g * following - value32[i]
            advantage = delta + g * l * advantage
            following, wanted[i] = value32[i], advantage
        assert credit.advantages.tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-6)


def test_a_turn_without_tokens_keeps_its_reward(tape, episode):
    from dataclasses import replace

    t = tape([0, 1, 1], turn_rewards=[0.0])
    empty = replace(t.turns[0], observation=(3, 3), sampled=(3, 3), reward=1.0)
    t = replace(t, turns=(*t.turns, empty))
    (credit,) = run([(t, np.zeros(3))], reward=1.0, episode=episode)
    assert credit.returns.tolist() == pytest.approx([0, 1, 1])


def test_a03_what_was_observed_is_neither_whitened_nor_counted(tape, episode):
    (credit,) = run(
        [(tape([1, 1, 1, 0]), [-5, -4, -2, 99])],
        reward=1.0,
        episode=episode,
        lam=0.0,
        unit="token",
        whitening=True,
    )
    assert credit.returns.tolist() == pytest.approx([-4, -2, 1, 0])  # advantages 1, 2, 3 before
    assert credit.advantages.tolist() == pytest.approx([-1, 0, 1, 0])


def test_a05_the_bootstrap_is_that_of_the_last_tape_of_a_chain(tape, episode):
    tapes = [tape([0, 1]), tape([0, 0, 1])]
    scores = [
        TokenScores(np.zeros(n, np.float32), values=np.zeros(n, np.float32), bootstrap=after)
        for n, after in ((2, 7.0), (3, 0.5))
    ]
    cut = Group("g", (episode(0.0, tapes, end="max_turns"),))
    first, last = gae([cut], [[scores]], whitening=False)[0][0]
    assert (first.returns[1], last.returns[2]) == pytest.approx((0.5, 0.5))


def test_q09_kl_in_reward_is_of_the_policy_that_sampled(tape):
    t = tape([1, 1], logprobs=[-1.0, -2.0])
    now = TokenScores(np.float32([-5, -5]), ref_logprobs=np.float32([-1.5, -2.0]))
    assert kl_in_reward(t, now, 0.1).tolist() == pytest.approx([-0.05, 0])
