"""`jaxrl.envs.verifiers.loops`: work in the event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from jaxrl.envs.verifiers.loops import LoopThread
from jaxrl.errors import EnvError


async def nothing() -> None:
    pass


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    loops = LoopThread("a test")
    yield loops
    loops.close(nothing)


async def test_work_runs_in_the_threads_one_loop_and_its_result_comes_back(thread: LoopThread) -> None:
    async def where() -> tuple[str, int]:
        return threading.current_thread().name, id(asyncio.get_running_loop())

    (name, loop), again = await asyncio.gather(thread.run(where), thread.run(where))
    assert name == "a test" and (name, loop) == again and loop != id(asyncio.get_running_loop())


async def test_what_work_raises_is_raised_and_the_thread_goes_on(thread: LoopThread) -> None:
    async def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyError, match="'x'"):
        await thread.run(lambda: fail(KeyError("x")))
    with pytest.raises(EnvError, match="SystemExit: 3"):
        await thread.run(lambda: fail(SystemExit(3)))
    await thread.run(nothing)


async def test_whoever_gives_up_waits_for_the_clean_up(thread: LoopThread) -> None:
    has_begun, is_clean = threading.Event(), False

    async def work() -> None:
        nonlocal is_clean
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            is_clean = True

    waiting = asyncio.create_task(thread.run(work))
    while not has_begun.is_set():
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert is_clean


async def test_closing_cancels_what_runs_before_it_gives_back_what_that_shared() -> None:
    thread, events, has_begun = LoopThread("a test"), [], threading.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            events.append("work")

    async def last() -> None:
        events.append("shared")

    waiting = asyncio.create_task(thread.run(work))
    while not has_begun.is_set():
        await asyncio.sleep(0.01)
    thread.close(last)
    thread.close(last)
    assert events == ["work", "shared"]
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(EnvError, match="the thread of a test has ended"):
        await thread.run(nothing)
