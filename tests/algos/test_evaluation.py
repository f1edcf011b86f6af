"""pass@k and intervals against values worked out by hand."""

import itertools
import math

import pytest

from uni_agent.algos.evaluation import clustered_interval, pass_at_k, wilson_interval


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 2), (5, 3, 4)])
def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_one(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        pass_at_k(2, 1, 3)


def test_wilson_interval_known_values() -> None:
    # 8 of 10 at 95%: the textbook interval
    mean, low, high = wilson_interval(8, 10)
    assert (mean, round(low, 4), round(high, 4)) == (0.8, 0.4902, 0.9433)
    nothing = wilson_interval(0, 0)  # no estimate, and every share is possible
    assert math.isnan(nothing.mean)
    assert nothing[1:] == (0.0, 1.0)
    assert wilson_interval(0, 20).low == 0.0 < wilson_interval(0, 20).high


def test_clustered_interval_uses_the_unbiased_deviation() -> None:
    mean, low, high = clustered_interval([1, 2, 3, 4])
    assert mean == 2.5
    assert high - mean == pytest.approx(1.96 * 1.2909944 / 2)
    assert mean - low == pytest.approx(high - mean)
    assert math.isinf(clustered_interval([1.0]).high)
