"""Ctrl-C as a flag that a recipe looks at between two safe points, so that it can save first."""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C came; the message says how to go on."""


class Interrupt:
    """Whether Ctrl-C came."""

    def __init__(self) -> None:
        self._asked = False
        self._waiter: asyncio.Event | None = None

    def ask(self) -> None:
        """What the signal does; in the thread of the event loop, where there is one."""
        self._asked = True
        if self._waiter is not None:
            self._waiter.set()

    def check(self) -> None:
        """Raise Interrupted if Ctrl-C came."""
        if self._asked:
            raise Interrupted

    async def race(self, work: Awaitable[T]) -> T:
        """Wait for `work`, or cancel it and raise Interrupted as soon as Ctrl-C comes."""
        self.check()
        self._waiter = asyncio.Event()
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._waiter.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task})
            raise Interrupted
        finally:
            self._waiter = None
            for left in (task, asked):
                left.cancel()


@contextmanager
def interruptible() -> Generator[Interrupt]:
    """Turn the first Ctrl-C inside into a flag; the second one acts as ever.

    Outside the main thread signals do not arrive, and the flag is never set.
    """
    interrupt = Interrupt()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    try:
        before = signal.getsignal(signal.SIGINT)

        def asked(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            if loop is None:
                interrupt.ask()
            else:
                loop.call_soon_threadsafe(interrupt.ask)

        signal.signal(signal.SIGINT, asked)
    except ValueError:
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def resume_hint(recipe: str, path: Path) -> str:
    """The command that goes on with a run."""
    return f"saved; go on with: uni-agent train {recipe} --resume {shlex.quote(str(path))}"


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a recipe to its end; what was saved on Ctrl-C becomes the KeyboardInterrupt's message."""
    try:
        return asyncio.run(work)
    except Interrupted as interrupted:
        raise KeyboardInterrupt(*interrupted.args) from None
