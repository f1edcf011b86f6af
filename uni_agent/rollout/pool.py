"""Runs many episodes at once: in groups for training, flat for evaluation and data.

Tasks flow in, groups flow out in the order in which they were admitted. The pool knows nothing of
training but when new weights are live; that alone bounds how old a trained token can be.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import NamedTuple, Protocol

from uni_agent.errors import RunError, UsageError
from uni_agent.rollout.episode import ERROR_ENDS, episode_id
from uni_agent.types import TRAINING_POLICY, Episode, Group, Task, derive_seed


class RunEpisode(Protocol):
    """Runs one episode: `EpisodeRunner.run`."""

    async def __call__(self, task: Task, *, episode_id: str, seed: int) -> Episode: ...


class StepFailed(RunError):
    """Every episode of a step ended in an error. `groups` holds them, so that they can be stored."""

    def __init__(self, step: int, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        episodes = [episode for group in groups for episode in group.episodes]
        first = episodes[0]
        reason = (first.error or "no error text").partition("\n")[0]
        super().__init__(
            f"all {len(episodes)} episodes of step {step} failed; the first, {first.id}, ended "
            f"{first.end}: {reason}"
        )


class _Job(NamedTuple):
    """One episode to run: the `number`-th of its task in its step."""

    task: Task
    step: int
    number: int


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A group on its way."""

    id: str
    jobs: tuple[_Job, ...]
    worker: asyncio.Task[Group | None]


@dataclass(slots=True, kw_only=True)
class GroupPool:
    """Runs groups ahead of training by at most `max_staleness` steps; an async context manager.

    At most (max_staleness + 1) steps' worth of groups is admitted and not yet trained; a step's
    slots are freed by `weights_live`, once per step. Groups leave in admission order. So no token is
    more than `max_staleness` updates old when it trains, and 0 is on-policy. Where weights are
    published more often than once a step, episodes that became too old are sampled again.

    An episode whose end asks for a retry runs again, up to `max_retries` times; the attempts that
    were lost are kept for `take_lost`. `tasks` starts at the beginning, and the first `position`
    tasks are skipped: pass the `position` of a checkpoint to go on from there. `counts` are totals
    since the start: "episodes", "retried", "stale", and one per end reason.
    """

    run: RunEpisode
    tasks: Iterable[Task]
    group_size: int
    groups_per_step: int
    max_staleness: int = 0
    max_concurrent_episodes: int = 256
    max_retries: int = 2
    seed: int = 0
    position: int = 0
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    _source: Iterator[Task] = field(init=False)
    _slots: asyncio.Semaphore = field(init=False)
    _workers: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _pending: deque[_Admitted] = field(default_factory=deque[_Admitted], init=False)
    _seen: Counter[str] = field(default_factory=Counter[str], init=False)
    _lost: list[Episode] = field(default_factory=list[Episode], init=False)
    _failure: Exception | None = field(default=None, init=False)
    _source_ended: bool = field(default=False, init=False)
    _admitted: int = field(default=0, init=False)
    _steps_out: int = field(default=0, init=False)
    _steps_live: int = field(default=0, init=False)
    _version: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_step", "max_concurrent_episodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_staleness", "max_retries", "position"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")
        self._slots = asyncio.Semaphore(self.max_concurrent_episodes)
        self._admitted = self.position
        self._source = islice(self.tasks, self.position, None)

    async def __aenter__(self) -> GroupPool:
        """Start the first groups."""
        await self._workers.__aenter__()
        self._admit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs and wait until it has ended; the body's own error goes on as it is."""
        for admitted in self._pending:
            admitted.worker.cancel()
        await self._workers.__aexit__(None, None, None)

    async def next_step(self) -> list[Group]:
        """Wait for the groups of the next step; fewer at the end of the tasks, none after it.

        Raises StepFailed when every episode of the step ended in an error, RunError when the tasks
        or the runner broke, UsageError when nothing is admitted because `weights_live` was not
        called.
        """
        batch = list(islice(self._pending, self.groups_per_step))
        if not batch and not self._source_ended and self._failure is None:
            raise UsageError(
                f"call {self._steps_out + 1} of next_step came after {self._steps_live} of weights_live; "
                f"with max_staleness {self.max_staleness} call weights_live after each update"
            )
        while self._failure is None and not all(admitted.worker.done() for admitted in batch):
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise RunError(f"the rollout broke: {_named(self._failure)}") from self._failure
        groups = [group for admitted in batch if (group := admitted.worker.result()) is not None]
        if any(_is_stale(episode, self._oldest_allowed) for group in groups for episode in group.episodes):
            groups = [await self._refresh(*pair) for pair in zip(batch, groups, strict=True)]
        if groups and all(episode.end in ERROR_ENDS for group in groups for episode in group.episodes):
            raise StepFailed(batch[0].jobs[0].step, groups)
        for _ in batch:
            self._pending.popleft()
        self.position += len(batch)
        self._steps_out += bool(batch)
        return groups

    def weights_live(self, version: int) -> None:
        """Say that engines now sample with `version`: the step handed out last has been trained.

        Call it once per step, also when the step was skipped and `version` stayed. Raises RunError
        when the version goes backwards.
        """
        if version < self._version:
            raise RunError(f"weights version {version} came after {self._version}; versions only rise")
        self._version = version
        self._steps_live = min(self._steps_live + 1, self._steps_out)
        self._admit()

    def take_lost(self) -> list[Episode]:
        """Hand over the attempts that were repeated since the last call, for the store."""
        lost, self._lost = self._lost, []
        return lost

    def _admit(self) -> None:
        steps = self.max_staleness + 1 + self._steps_live - self._steps_out
        while len(self._pending) < steps * self.groups_per_step and not self._source_ended:
            try:
                task = next(self._source, None)
            except Exception as error:
                self._failure = error
                self._changed.set()
                return
            if task is None:
                self._source_ended = True
                return
            self._start(task)

    def _start(self, task: Task) -> None:
        step, place = divmod(self._admitted, self.groups_per_step)
        if place == 0:
            self._seen.clear()
        self._admitted += 1
        repeat = self._seen[task.id]
        self._seen[task.id] += 1
        group_id = f"{step}/{task.id}" + (f"#{repeat}" if repeat else "")
        first = repeat * self.group_size
        jobs = tuple(_Job(task, step, index) for index in range(first, first + self.group_size))
        worker = self._workers.create_task(self._run_group(group_id, jobs), name=group_id)
        self._pending.append(_Admitted(group_id, jobs, worker))

    async def _run_group(self, group_id: str, jobs: Sequence[_Job]) -> Group | None:
        try:
            return Group(group_id, tuple(await self._run_all(jobs, 0)))
        except Exception as error:
            self._failure = self._failure or error
            return None
        finally:
            self._changed.set()

    async def _run_all(self, jobs: Sequence[_Job], first_attempt: int) -> list[Episode]:
        async with asyncio.TaskGroup() as members:
            running = [members.create_task(self._run_one(job, first_attempt)) for job in jobs]
        return [task.result() for task in running]

    async def _run_one(self, job: _Job, first_attempt: int) -> Episode:
        last = first_attempt + self.max_retries
        async with self._slots:
            for attempt in range(first_attempt, last + 1):
                episode = await _attempt(self.run, job, attempt, self.seed)
                self.counts["episodes"] += 1
                self.counts[episode.end] += 1
                if TRAINING_POLICY[episode.end] != "retry" or attempt == last:
                    return episode
                self.counts["retried"] += 1
                self._lost.append(episode)
        raise AssertionError("the loop returns in its last round")

    @property
    def _oldest_allowed(self) -> int:
        return self._version - self.max_staleness

    async def _refresh(self, admitted: _Admitted, group: Group) -> Group:
        """Sample the episodes again that hold tokens older than `max_staleness` versions."""
        stale = [i for i, e in enumerate(group.episodes) if _is_stale(e, self._oldest_allowed)]
        if not stale:
            return group
        self.counts["stale"] += len(stale)
        self._lost += [group.episodes[i] for i in stale]
        episodes = list(group.episodes)
        try:
            again = await self._run_all([admitted.jobs[i] for i in stale], self.max_retries + 1)
        except ExceptionGroup as error:
            raise RunError(f"the rollout broke: {_named(error)}") from error
        for i, episode in zip(stale, again, strict=True):
            if _is_stale(episode, self._oldest_allowed):
                raise RunError(
                    f"episode {episode.id} was sampled with version {episode.oldest_version} after version "
                    f"{self._version} was said to be live; the engine did not take the new weights"
                )
            episodes[i] = episode
        return replace(group, episodes=tuple(episodes))


async def run_many(
    run: RunEpisode,
    tasks: Sequence[Task],
    *,
    num_episodes: int,
    concurrency: int = 256,
    seed: int = 0,
    step: int = 0,
    progress: Callable[[int, int, Episode], None] | None = None,
) -> list[Episode]:
    """Run `num_episodes` in all, spread evenly over the tasks (earlier tasks take the remainder).

    Returns them task by task: all episodes of the first task, then of the second. `progress` is
    called after each with (done, total, episode). `step` goes into ids and seeds. Raises RunError
    when the runner itself raises.
    """
    if not tasks:
        raise UsageError("there are no tasks to run; the task set is empty")
    if num_episodes < 0 or concurrency < 1:
        raise UsageError(
            f"num_episodes is {num_episodes} and concurrency {concurrency}; expected >= 0 and >= 1"
        )
    each, more = divmod(num_episodes, len(tasks))
    seen: Counter[str] = Counter()
    plan: list[_Job] = []
    for place, task in enumerate(tasks):
        count = each + (place < more)
        plan += [_Job(task, step, seen[task.id] + index) for index in range(count)]
        seen[task.id] += count
    found: dict[int, Episode] = {}
    jobs = iter(enumerate(plan))

    async def work() -> None:
        for place, job in jobs:
            found[place] = await _attempt(run, job, 0, seed)
            if progress is not None:
                progress(len(found), len(plan), found[place])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(plan))):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise RunError(f"the rollout broke: {_named(group)}") from group
    return [found[place] for place in range(len(plan))]


def drop_stale(groups: Sequence[Group], version: int, max_staleness: int) -> tuple[list[Group], int]:
    """Leave out episodes whose oldest token is more than `max_staleness` versions behind `version`.

    Returns the groups that still have episodes, and how many episodes were dropped. The pool's own
    groups need none of this; it is for episodes from elsewhere (a buffer of live traffic).
    """
    kept: list[Group] = []
    for group in groups:
        fresh = tuple(e for e in group.episodes if not _is_stale(e, version - max_staleness))
        if fresh:
            kept.append(replace(group, episodes=fresh))
    dropped = sum(len(g.episodes) for g in groups) - sum(len(g.episodes) for g in kept)
    return kept, dropped


def _is_stale(episode: Episode, oldest_allowed: int) -> bool:
    oldest = episode.oldest_version
    return oldest is not None and oldest < oldest_allowed


async def _attempt(run: RunEpisode, job: _Job, attempt: int, seed: int) -> Episode:
    task, step, number = job
    parts = (seed, step, task.id, number, attempt) if attempt else (seed, step, task.id, number)
    return await run(task, episode_id=episode_id(step, task.id, number, attempt), seed=derive_seed(*parts))


def _named(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
