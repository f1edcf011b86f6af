"""Measuring a policy on tasks: run the attempts, and turn episodes into figures with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from uni_agent.algos.evaluation import Interval, clustered_interval, pass_at_k, wilson_interval
from uni_agent.envs import TaskSet
from uni_agent.errors import RunError
from uni_agent.rollout import EpisodeRunner, run_many
from uni_agent.track import LiveConsole
from uni_agent.types import Episode

Progress = Callable[[int, int, Episode], None]
"""(episodes done, episodes in all, the episode that has just ended)"""


@dataclass(frozen=True, slots=True)
class Report:
    """What an evaluation found. `success` and `first_turn` are shares of the scored episodes.

    `first_turn` are successes in a single model call. Intervals take the attempts of a task together:
    they are not independent.
    """

    success: Interval
    first_turn: Interval
    reward: Interval
    pass_at: Mapping[int, float]
    num_episodes: int
    num_unscored: int


def report(episodes: Sequence[Episode], *, success_at: float = 1.0, ks: Sequence[int] = (1,)) -> Report:
    """Summarise episodes. Unscored ones are counted and left out, never taken as failures."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.reward is not None:
            by_task.setdefault(episode.task.id, []).append(episode)
    num_scored = sum(len(group) for group in by_task.values())
    won = {task: [(e.reward or 0.0) >= success_at for e in group] for task, group in by_task.items()}
    wins = {task: sum(attempts) for task, attempts in won.items()}
    first = [[w and e.num_turns == 1 for w, e in zip(won[t], by_task[t], strict=True)] for t in by_task]
    per_task = [sum(e.reward or 0.0 for e in group) / len(group) for group in by_task.values()]
    pass_k: dict[int, float] = {}
    for k in ks:
        full = [pass_at_k(len(group), wins[task], k) for task, group in by_task.items() if len(group) >= k]
        pass_k[k] = sum(full) / len(full) if full else float("nan")
    return Report(
        success=_share(list(won.values())),
        first_turn=_share(first),
        reward=clustered_interval(per_task),
        pass_at=pass_k,
        num_episodes=len(episodes),
        num_unscored=len(episodes) - num_scored,
    )


def _share(per_task: Sequence[Sequence[bool]]) -> Interval:
    """The share of True with Wilson's interval, for as many independent attempts as these are worth.

    Attempts of a task resemble each other: the variance between tasks says how much. Of one task
    alone nothing is known but its attempts.
    """
    attempts = [attempt for group in per_task for attempt in group]
    if not attempts:
        return wilson_interval(0, 0)
    share = sum(attempts) / len(attempts)
    # residuals per task, as in a cluster-robust variance of a ratio
    squares = sum((sum(group) - share * len(group)) ** 2 for group in per_task)
    worth = len(attempts) ** 2 * share * (1 - share) / squares if squares else len(attempts)
    worth = min(worth, len(attempts))
    return wilson_interval(share * worth, worth)


def require_scored(episodes: Sequence[Episode]) -> None:
    """Raise RunError when not one episode has a reward: nothing was measured."""
    if all(episode.reward is None for episode in episodes):
        first = episodes[0]
        reason = (first.error or first.reward_reason or "no reason given").partition("\n")[0]
        raise RunError(
            f"none of {len(episodes)} episodes could be scored; the first, {first.id}, ended {first.end}: "
            f"{reason}"
        )


async def attempt(
    runner: EpisodeRunner,
    tasks: TaskSet,
    *,
    num_attempts: int = 1,
    concurrency: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Episode]:
    """Run every task `num_attempts` times. The same seed gives each task the same random stream."""
    chosen = list(tasks)
    return await run_many(
        runner.run,
        chosen,
        num_episodes=num_attempts * len(chosen),
        concurrency=concurrency,
        seed=seed,
        progress=progress,
    )


def running_mean(live: LiveConsole) -> Progress:
    """A progress callback that shows the mean reward of the episodes so far."""
    rewards: list[float] = []

    def show(done: int, total: int, episode: Episode) -> None:
        if episode.reward is not None:
            rewards.append(episode.reward)
        live.step(done, {"reward": sum(rewards) / len(rewards) if rewards else None})

    return show


def summarise(found: Report) -> dict[str, float]:
    """The report as plain names and numbers."""
    rows: dict[str, float] = {}
    intervals = {"success": found.success, "first_turn": found.first_turn, "reward": found.reward}
    for name, interval in intervals.items():
        rows |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    rows |= {f"pass@{k}": value for k, value in found.pass_at.items()}
    return {**rows, "episodes": found.num_episodes, "unscored": found.num_unscored}


def held_out_figures(found: Mapping[str, Report], when: str) -> dict[str, object]:
    """Successes of each task set, with bounds: the first set as `held_out_*` and `first_attempt_*`."""
    figures: dict[str, object] = {}
    for number, (name, one) in enumerate(found.items()):
        own = "held_out" if number == 0 else name.removeprefix("held_out_") + "_held_out"
        first = "first_attempt" if number == 0 else name.removeprefix("held_out_") + "_first_attempt"
        for key, interval in ((own, one.success), (first, one.first_turn)):
            figures[f"{key}_{when}"] = interval.mean
            figures[f"{key}_{when}_interval"] = [interval.low, interval.high]
    return figures
