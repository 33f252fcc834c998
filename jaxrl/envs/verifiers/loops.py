"""An event loop in a thread of its own, for asynchronous code that may block: the loop of the run goes on meanwhile.

In: coroutine functions, from any event loop. Out: what they return or raise. Cancelling whoever waits cancels the work, and waits for its
clean-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxrl.errors import EnvError

T = TypeVar("T")

CLEAN_UP_S = 8.0
"""How long cancelled work may take to clean up after itself; when all ends, half of it for the work and half for what it shared."""
STOP_S = 10.0
"""How long `close` waits for the thread, which may be in the middle of something that blocks."""


class LoopThread:
    """An event loop that starts with the first work. Thread-safe.

    Args:
      name: name of the thread, for messages too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` in the thread's loop, and wait for it in the current one.

        Raises:
          Exception: what it raised; an `EnvError` in place of what would end the thread, such as a SystemExit.
          asyncio.CancelledError: the caller was cancelled, or the thread was closed.
        """
        loop = self._running()
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(_contained(work))
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda task: _settle(done, task))

        def give_up() -> None:
            for task in tasks:
                task.cancel()

        waiter = asyncio.wrap_future(done)
        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it was closed meanwhile
            waiter.cancel()
            raise EnvError(f"the thread of {self._name} has ended") from None
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not waiter.done():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(give_up)
                await asyncio.wait({waiter}, timeout=CLEAN_UP_S)
            waiter.add_done_callback(lambda late: late.cancelled() or late.exception())  # asyncio logs what nobody looked at
            raise

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Cancel what runs, run `last`, and end the thread; may be called twice, and does nothing if nothing ever ran.

        Args:
          last: gives back what the work shared.
        """
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is None or thread is None:
            return

        async def end() -> None:
            try:
                if tasks := set(self._tasks):
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=CLEAN_UP_S / 2)
                async with asyncio.timeout(CLEAN_UP_S / 2):
                    await last()
            finally:
                loop.stop()

        def begin() -> None:
            ending = loop.create_task(end())
            ending.add_done_callback(lambda task: task.cancelled() or task.exception())

        loop.call_soon_threadsafe(begin)
        thread.join(STOP_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise EnvError(f"the thread of {self._name} has ended")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _contained(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns; what would end the whole loop fails it alone."""
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvError(f"{type(error).__name__}: {error}") from error


def _settle(done: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        done.cancel()
        done.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
