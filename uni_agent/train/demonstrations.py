"""Conversations of a demonstrator as training items: which tokens an assistant would have sampled.

Rendered dialogues go in, Items go out; the loss on them is `algos.losses.sft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from uni_agent.errors import UsageError
from uni_agent.protocols import Credit, RenderedDialogue
from uni_agent.train.batch import Item
from uni_agent.types import Message, Sampling, Trajectory, Turn


def demonstration(
    dialogue: RenderedDialogue, messages: Sequence[Message], *, trained: Sequence[bool], number: int
) -> Item:
    """One conversation. `trained[i]` says whether message i is one to learn from; the others are context.

    Raises UsageError when nothing in it can be learned from.
    """
    index = np.asarray(dialogue.message_index)
    wanted = np.asarray([*trained, False])[index] & np.asarray(dialogue.sampled, bool)
    if not wanted.any():
        raise UsageError(f"conversation {number} has no assistant message to learn from")
    turns: list[Turn] = []
    before = 0
    for (message, sampled), places in groupby(
        range(len(index)), key=lambda t: (int(index[t]), bool(wanted[t]))
    ):
        span = list(places)
        if sampled:
            start, end = span[0], span[-1] + 1
            turns.append(Turn((before, start), (start, end), (), messages[message], "stop", Sampling()))
            before = end
    token_ids = np.asarray(dialogue.token_ids, np.int32)
    trajectory = Trajectory(
        agent="demonstrator",
        token_ids=token_ids,
        sampled=wanted,
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), -1, np.int32),
        turns=tuple(turns),
    )
    return Item(trajectory, Credit(np.zeros(len(token_ids), np.float32)), number)
