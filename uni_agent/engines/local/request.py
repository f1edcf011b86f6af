"""One request on its way through the local engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from uni_agent.engines.local.stop import StopMatcher
from uni_agent.errors import EngineError
from uni_agent.types import Chunk, Completion, Float32Array, Int32Array, Sampling

Item = Chunk | Completion | EngineError


class Drawn(NamedTuple):
    """Tokens that a request has sampled so far: int32[n], float32[n], int32[n]."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array


NOTHING_DRAWN = Drawn(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


@dataclass(slots=True, eq=False)
class Request:
    """What one `generate` call asked for, and where its answer goes.

    `loop` and `mailbox` belong to the caller; the engine's thread posts items there. `row` is where
    it runs, -1 while it waits; `drawn` is what it had sampled when it lost its row, `sent` how many
    sampled tokens have left as chunks. `arrival` numbers the requests of an engine.
    """

    prompt: Int32Array
    sampling: Sampling
    session: str
    max_tokens: int
    seed: int
    matcher: StopMatcher | None
    loop: asyncio.AbstractEventLoop
    arrival: int
    mailbox: asyncio.Queue[Item] = field(default_factory=asyncio.Queue[Item])
    row: int = -1
    drawn: Drawn = NOTHING_DRAWN
    sent: int = 0
    done: bool = False

    @property
    def token_ids(self) -> Int32Array:
        """The prompt and what was sampled before the request lost its row."""
        return (
            np.concatenate([self.prompt, self.drawn.token_ids]) if len(self.drawn.token_ids) else self.prompt
        )
