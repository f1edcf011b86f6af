import numpy as np
import pytest

from uni_agent.algos import constant_length, episode_mean, sequence_mean, token_mean, token_sum

LOSSES = [np.array([4.0, 0, 0]), np.array([1.0, 1.0, 1.0])]
MASKS = [np.array([1, 0, 0], bool), np.array([1, 1, 1], bool)]


def total(weights, losses=LOSSES):
    return sum(float((w * x).sum()) for w, x in zip(weights, losses, strict=True))


def test_l01_token_mean_is_over_the_step():
    assert total(token_mean(MASKS, [0, 1])) == pytest.approx(1.75)
    assert total(token_mean(MASKS[::-1], [1, 0]), LOSSES[::-1]) == pytest.approx(1.75)


def test_what_each_form_averages():
    assert total(sequence_mean(MASKS, [0, 1])) == pytest.approx(2.5)
    assert total(episode_mean(MASKS, [7, 7])) == pytest.approx(1.75)
    assert total(episode_mean(MASKS, [0, 1])) == pytest.approx(2.5)
    assert total(constant_length(MASKS, [0, 1], length=10)) == pytest.approx(7 / 20)
    assert total(token_sum(MASKS, [0, 1])) == pytest.approx(7.0)


@pytest.mark.parametrize("form", [token_mean, sequence_mean, episode_mean])
def test_mean_forms_sum_to_one(form):
    rng = np.random.default_rng(1)
    masks = [rng.random(n) < p for n, p in [(5, 0.5), (40, 0.9), (3, 0.0), (17, 0.2), (9, 1.0)]]
    weights = form(masks, [0, 0, 1, 2, 2])
    assert sum(float(w.astype(np.float64).sum()) for w in weights) == pytest.approx(1, abs=1e-6)
    assert all(w.dtype == np.float32 and (w[~m] == 0).all() for w, m in zip(weights, masks, strict=True))


@pytest.mark.parametrize("form", [token_mean, sequence_mean, episode_mean, token_sum])
def test_l05_nothing_to_train_is_all_zero(form):
    weights = form([np.zeros(4, bool), np.zeros(2, bool)], [0, 1])
    assert all((w == 0).all() for w in weights)
    assert all((w == 0).all() for w in constant_length([np.zeros(4, bool)], [0], length=5))


def test_trajectories_that_do_not_train_do_not_count():
    masks = [*MASKS, np.zeros(6, bool)]
    assert sequence_mean(masks, [0, 1, 2])[0][0] == pytest.approx(0.5)
    assert episode_mean(masks, [0, 1, 2])[0][0] == pytest.approx(0.5)
    assert constant_length(masks, [0, 1, 2], length=10)[0][0] == pytest.approx(0.05)


def test_constant_length_needs_a_length():
    with pytest.raises(ValueError, match="length is 0"):
        constant_length(MASKS, [0, 1], length=0)
