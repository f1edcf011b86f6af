"""Ctrl-C as a flag: nothing is cut off between two safe points, and the second one acts as ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from uni_agent.recipes.interrupt import Interrupt, Interrupted, interruptible, resume_hint, run_blocking


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_is_a_flag_and_the_second_acts_as_ever() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupt:
        interrupt.check()
        press()
        with pytest.raises(Interrupted):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_is_put_back_when_the_body_fails() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_the_flag_is_never_set() -> None:
    said: list[str] = []

    def body() -> None:
        with interruptible() as interrupt:
            interrupt.check()
            said.append("ran")

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert said == ["ran"]


async def test_a_race_ends_the_work_as_soon_as_ctrl_c_comes() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)  # cleaning up takes its time, and is waited for
            ended.append("cleaned up")
            raise

    with interruptible() as interrupt:
        asyncio.get_running_loop().call_later(0.01, press)
        with pytest.raises(Interrupted):
            await asyncio.wait_for(interrupt.race(work()), 10)
    assert ended == ["cleaned up"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_race_gives_the_result_or_the_error_of_the_work() -> None:
    interrupt = Interrupt()

    async def fails() -> None:
        raise ValueError("mine")

    assert await interrupt.race(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ValueError, match="mine"):
        await interrupt.race(fails())
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_after_ctrl_c_no_work_is_begun() -> None:
    interrupt = Interrupt()
    interrupt.ask()
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    coroutine = work()
    with pytest.raises(Interrupted):
        await interrupt.race(coroutine)
    assert begun == []
    coroutine.close()


async def test_cancelling_a_race_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    race = asyncio.ensure_future(Interrupt().race(work()))
    await asyncio.sleep(0.01)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    await asyncio.wait_for(ended.wait(), 10)


def test_the_hint_is_a_command_that_a_shell_takes() -> None:
    hint = resume_hint("grpo", Path("runs/my run"))
    assert hint == "saved; go on with: uni-agent train grpo --resume 'runs/my run'"


def test_what_was_saved_becomes_the_message_of_the_keyboard_interrupt() -> None:
    async def recipe() -> None:
        raise Interrupted("saved; go on with: x")

    async def fine() -> int:
        return 3

    with pytest.raises(KeyboardInterrupt, match="go on with: x"):
        run_blocking(recipe())
    assert run_blocking(fine()) == 3
