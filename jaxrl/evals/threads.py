"""Threads in which a function of somebody's runs, which are there while a policy is held.

In: plain functions. Out: what they return. When nobody holds the policy any more, what has begun is waited for and the rest is dropped:
whoever changes what the functions use may then go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from jaxrl.errors import DeadlineError


class HeldThreads:
    """The threads in which a function runs, which are there while the policy is held.

    Args:
      num_workers: calls that run at the same time.
      name: the function, for messages.
      version: the version of the policy, asked once per hold; None if nobody counts.
      stop_deadline_s: how long a hold that ends waits for calls that still run.
    """

    def __init__(self, num_workers: int, name: str, version: Callable[[], int] | None, stop_deadline_s: float) -> None:
        self._num_workers = num_workers
        self._name = name
        self._version = version
        self._stop_deadline_s = stop_deadline_s
        self._num_holders = 0
        self._pool: ThreadPoolExecutor | None = None
        self._calls: set[Future[Any]] = set()

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[int | None]:
        """Keep the threads for the body of the `async with`, and give the policy's version.

        Raises:
          DeadlineError: a call still runs long after the last hold.
        """
        self._num_holders += 1
        try:
            yield None if self._version is None else self._version()
        finally:
            self._num_holders -= 1
            if self._num_holders == 0 and self._pool is not None:
                pool, self._pool = self._pool, None
                await self._stop(pool, holder)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what a plain function returns in one of the threads."""
        if self._num_holders == 0:
            raise RuntimeError("it answers only while its policy is held; play its episodes within `async with policy.hold(...)`")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="function policy")
        future = self._pool.submit(function)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(future)

    async def _stop(self, pool: ThreadPoolExecutor, holder: str) -> None:
        """Drop the calls that have not begun, and wait for those that have: nobody else may use what they use."""
        pool.shutdown(wait=False, cancel_futures=True)
        running = [asyncio.wrap_future(call) for call in list(self._calls)]
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=self._stop_deadline_s)
        if late:
            raise DeadlineError(
                f"{holder} is over, and a call of {self._name} still runs after {self._stop_deadline_s:g} s (`stop_deadline_s`); have it "
                "return sooner"
            )
