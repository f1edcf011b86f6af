"""Builders of tapes and groups from masks and rewards."""

import copy

import numpy as np
import pytest
import torch

from uni_agent.models import PACKED_ATTENTION, Reference, register_packed_attention
from uni_agent.types import Episode, Group, Message, Sampling, Task, Trajectory, Turn

torch.set_num_threads(1)


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


class TinyModel:
    """A Qwen3 of a few thousand parameters behind the attributes of HFModel that a learner uses."""

    def __init__(self, *, seed=0, dtype=torch.float32, dropout=0.0, **config):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        settings = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_dropout": dropout,
            "initializer_range": 0.3,
        }
        register_packed_attention()
        made = Qwen3Config(**(settings | config), attn_implementation=PACKED_ATTENTION)
        self.module = Qwen3ForCausalLM(made).to(dtype)

    def fresh_reference(self):
        return Reference(copy.deepcopy(self.module).eval().requires_grad_(False), beneath_adapter=False)

    def save(self, path):
        self.module.save_pretrained(path)


@pytest.fixture
def tiny():
    return TinyModel
