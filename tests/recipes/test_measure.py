"""Figures about episodes: who is counted, what a success is, and the two intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from uni_agent.algos.evaluation import wilson_interval
from uni_agent.errors import RunError
from uni_agent.recipes.measure import held_out_figures, report, require_scored, summarise
from uni_agent.types import Episode, Message, Sampling, Task, Trajectory, Turn


def episode(task: str, reward: float | None, num_turns: int = 1) -> Episode:
    """One that ended after `num_turns` model calls of one token each."""
    turns = tuple(
        Turn((i, i), (i, i + 1), (), Message("assistant"), "stop", Sampling()) for i in range(num_turns)
    )
    tape = Trajectory(
        "main",
        np.zeros(num_turns, np.int32),
        np.ones(num_turns, bool),
        np.zeros(num_turns, np.float32),
        np.zeros(num_turns, np.int32),
        turns,
    )
    return Episode(f"{task}/0", Task(task, ()), (tape,), "done", reward=reward)


EPISODES = [
    episode("a", 1.0),
    episode("a", 0.0, 2),
    episode("a", None),
    episode("b", 1.0, 3),
    episode("b", 0.5),
    episode("c", None),
]


def test_unscored_episodes_are_left_out_and_counted() -> None:
    found = report(EPISODES)
    assert (found.num_episodes, found.num_unscored) == (6, 2)
    assert found.success == wilson_interval(2, 4)
    assert found.reward.mean == pytest.approx((0.5 + 0.75) / 2)  # two tasks, not four episodes
    assert found.reward.high - found.reward.mean == pytest.approx(1.96 * 0.125)


def test_first_turn_is_success_in_one_model_call() -> None:
    assert report(EPISODES).first_turn == wilson_interval(1, 4)  # b's success took three turns
    assert report([episode("a", 0.0), episode("b", 1.0, 2)]).first_turn.mean == 0


def test_attempts_of_a_task_are_not_independent() -> None:
    """100 tasks, each always solved or never, four times: no more is known than from one attempt each."""
    alike = [episode(str(task), float(task % 2)) for task in range(100) for _ in range(4)]
    assert report(alike).success == pytest.approx(wilson_interval(50, 100))
    mixed = [episode(str(task), float(attempt % 2)) for task in range(100) for attempt in range(4)]
    assert report(mixed).success == pytest.approx(wilson_interval(200, 400))
    rng = np.random.default_rng(0)
    chance = rng.uniform(size=100)
    some = [episode(str(task), float(rng.random() < chance[task])) for task in range(100) for _ in range(4)]
    _, low, high = report(some).success
    means = [np.mean([e.reward for e in some[4 * task : 4 * task + 4]]) for task in range(100)]
    clustered = 2 * 1.96 * float(np.std(means, ddof=1)) / 10
    assert high - low == pytest.approx(clustered, rel=0.05)


def test_success_at_is_a_threshold() -> None:
    assert report(EPISODES, success_at=0.5).success == wilson_interval(3, 4)
    assert report(EPISODES, success_at=0.5).first_turn == wilson_interval(2, 4)


def test_pass_at_k_is_per_task_and_over_scored_attempts() -> None:
    pass_at = report(EPISODES, ks=(1, 2, 3)).pass_at
    assert pass_at[1] == pytest.approx((0.5 + 0.5) / 2)
    assert pass_at[2] == 1.0
    assert math.isnan(pass_at[3])  # a third attempt at a exists, but nobody scored it
    uneven = [episode("a", 1.0), episode("a", 0.0), episode("b", 0.0), episode("b", 0.0), episode("c", 1.0)]
    assert report(uneven, ks=(1, 2)).pass_at == {1: pytest.approx(0.5), 2: pytest.approx(0.5)}


def test_nothing_scored_claims_nothing() -> None:
    found = report([episode("a", None)])
    assert (found.success.low, found.success.high, found.num_unscored) == (0.0, 1.0, 1)
    assert math.isnan(found.success.mean)
    assert math.isnan(found.reward.mean)
    assert math.isnan(found.pass_at[1])


def test_the_rows_say_what_the_report_says() -> None:
    rows = summarise(report(EPISODES, ks=(1, 2)))
    assert (rows["episodes"], rows["unscored"], rows["pass@2"]) == (6, 2, 1.0)
    assert rows["success_low"] < rows["success"] == 0.5 < rows["success_high"]
    assert rows["first_turn"] == 0.25


def test_the_first_held_out_set_has_the_short_names() -> None:
    found = {"held_out": report(EPISODES), "held_out_hard": report(EPISODES[:1])}
    figures = held_out_figures(found, "after")
    assert figures["held_out_after"] == 0.5
    assert figures["first_attempt_after"] == 0.25
    assert figures["hard_held_out_after"] == figures["hard_first_attempt_after"] == 1.0
    assert figures["held_out_after_interval"] == list(wilson_interval(2, 4)[1:])


def test_an_evaluation_that_scored_nothing_is_an_error() -> None:
    require_scored(EPISODES)
    failed = replace(episode("a", None), end="engine_error", error="EngineError: refused\nframes")
    with pytest.raises(RunError, match=r"none of 2 .* a/0, ended engine_error: EngineError: refused$"):
        require_scored([failed, episode("c", None)])
