"""What the engine's thread asks of a stepper: one iteration's work, and what it forgets when.

`step.PagedStepper` serves models whose keys and values lie in the paged cache,
`recurrent` those with a state of their own. A stepper knows the model and the rows, and
nothing of threads, event loops or answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from uni_agent.engines.local.request import Request
from uni_agent.engines.local.rows import Int64Array, Rows
from uni_agent.errors import EngineError
from uni_agent.types import Float32Array, Int32Array

Sampled = Callable[[Int64Array, Int32Array, Float32Array], None]
"""Takes rows, ids and logprobs: one new token for each row. Writes them down, and may end requests."""

Refused = Callable[[Request, EngineError], None]
"""Takes a request that can never run, and why. It holds no row and waits no longer."""


@dataclass(slots=True)
class Counters:
    """What happened since the last look; see `LocalEngine.stats`."""

    sampled: int = 0
    prefilled: int = 0
    reused: int = 0
    copied: int = 0
    finished: int = 0
    preempted: int = 0
    evicted: int = 0
    decodes: int = 0
    decode_rows: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Stepper(Protocol):
    """Runs a model for the requests in `rows`, at most `rows.count` at a time."""

    rows: Rows
    counters: Counters
    """Replaced by the loop when it takes them."""

    @property
    def module(self) -> nn.Module:
        """The module that weights are read from; new ones are copied into it."""
        ...

    @property
    def used(self) -> float:
        """Which fraction of the cache's memory holds something, 0 to 1."""
        ...

    def refresh(self) -> None:
        """Take the module's parameters as they are now. Caches stay until `invalidate`."""
        ...

    def invalidate(self) -> None:
        """Drop all caches (new weights, or a failure); running requests are computed again from
        their tokens before they go on."""
        ...

    def iterate(self, waiting: deque[Request]) -> None:
        """Take requests from the left of `waiting` while there is room, and run the model once.

        Ends within about one pass over `prefill_tokens` tokens, so that commands are seen. May put
        running requests back to the left of `waiting` (preemption: `request.drawn` keeps what they
        sampled). A request that can never run goes to `refused`.
        """
        ...

    def release(self, row: int, *, keep: bool) -> None:
        """The row's request is over; `keep` what was computed for its session, or forget it."""
        ...

    def forget(self, session: str) -> None:
        """Drop what is kept for a session alone."""
        ...
