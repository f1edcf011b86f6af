"""One request on its way through the local engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from uni_agent.engines.local_stop import StopMatcher
from uni_agent.errors import EngineError
from uni_agent.types import Chunk, Completion, Int32Array, Sampling

Item = Chunk | Completion | EngineError


@dataclass(slots=True, eq=False)
class Request:
    """What one `generate` call asked for, and where its answer goes.

    `loop` and `mailbox` belong to the caller; the engine's thread posts items there. `row` is its
    slot while it runs, `sent` how many sampled tokens have left as chunks.
    """

    prompt: Int32Array
    sampling: Sampling
    session: str
    max_tokens: int
    seed: int
    matcher: StopMatcher | None
    loop: asyncio.AbstractEventLoop
    mailbox: asyncio.Queue[Item] = field(default_factory=asyncio.Queue[Item])
    row: int = -1
    sent: int = 0
    done: bool = False
