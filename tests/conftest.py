"""Builders of tapes and groups from masks and rewards; and that Ctrl-C arrives."""

import signal

import numpy as np
import pytest

from uni_agent.types import Episode, Group, Message, Sampling, Task, Trajectory, Turn


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_arrives():
    """A shell starts background jobs with SIGINT ignored, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def make_tape(mask, *, logprobs=None, turn_rewards=None, sampling=None, agent="main", ids=None, version=0):
    mask = np.asarray(mask, bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    rewards = turn_rewards if turn_rewards is not None else [None] * len(spans)
    turns, before = [], 0
    for (start, end), reward in zip(spans, rewards, strict=True):
        turns.append(
            Turn(
                (before, start),
                (start, end),
                (),
                Message("assistant"),
                "stop",
                sampling or Sampling(),
                reward=reward,
            )
        )
        before = end
    n = len(mask)
    logprobs = np.zeros(n) if logprobs is None else logprobs
    return Trajectory(
        agent,
        np.asarray(ids if ids is not None else np.arange(n) % 7, np.int32),
        mask,
        np.where(mask, logprobs, 0).astype(np.float32),
        np.where(mask, version, -1).astype(np.int32),
        tuple(turns),
    )


def make_episode(reward=None, tapes=None, *, end="done", id="e", trainable=True):
    tapes = tapes if tapes is not None else [make_tape([0, 1, 1])]
    return Episode(id, Task("t", ()), tuple(tapes), end, reward=reward, trainable=trainable)


def make_group(rewards, id="g"):
    return Group(id, tuple(make_episode(r, id=f"{id}/{i}") for i, r in enumerate(rewards)))


@pytest.fixture
def tape():
    return make_tape


@pytest.fixture
def episode():
    return make_episode


@pytest.fixture
def group():
    return make_group
