"""The channel between the two arms when they share a process: train batches one way, reports and versions the other.

The asyncio side (the orchestrator) awaits; the trainer side (a thread) blocks. Every wait has a deadline and says who
waits for what. Batches pass by reference: nothing is copied or encoded, so a sender must not write to a batch that it
has sent.

| who | waits in | for | unblocked by |
|---|---|---|---|
| orchestrator | `send` | room for a batch | `receive`, `fail`, `close` |
| orchestrator | `next_report` | a step report | `report`, `fail`, `close` once nothing is outstanding |
| orchestrator | `next_version` | a newer policy version | `announce`, `fail`, `close` once nothing is outstanding |
| trainer | `receive` | a train batch | `send`, `fail`, `close` |
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from jaxrl.errors import DeadlineError, RunFailedError
from jaxrl.types import StepReport, TrainBatch

T = TypeVar("T")


class InProcessChannel:
    """A bounded queue of train batches with its answers, between an event loop and a trainer thread.

    Args:
      capacity: batches that may wait for the trainer, `>= 1`; a further `send` waits.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity`={capacity!r} must be at least 1")
        self._capacity = capacity
        # Invariant: every field below is read and written under this condition's lock, which is never held across a
        # wait of the event loop.
        self._changed = threading.Condition()
        self._batches: deque[TrainBatch] = deque()
        self._reports: deque[StepReport] = deque()
        self._num_outstanding = 0
        self._newest_version: int | None = None
        self._is_closed = False
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which event loop the asyncio side runs on; without it the first wait decides."""
        with self._changed:
            self._loop = loop

    async def send(self, batch: TrainBatch, deadline_s: float) -> None:
        """Queue a batch for the trainer, waiting while the queue is full.

        Args:
          batch: the batch; the receiver may read it until it has reported its step.
          deadline_s: longest wait, in seconds.

        Raises:
          DeadlineError: the queue stayed full.
          RunFailedError: the channel is closed.
          BaseException: what `fail` was called with.
        """

        def put() -> bool | None:
            if self._is_closed:
                raise RunFailedError(
                    f"the batch of step {batch.step} cannot be sent: the channel to the trainer is closed"
                )
            if len(self._batches) >= self._capacity:
                return None
            self._batches.append(batch)
            self._num_outstanding += 1
            self._wake()
            return True

        await self._until(put, f"room to send the batch of step {batch.step}", deadline_s)

    async def next_report(self, deadline_s: float) -> StepReport:
        """Return the trainer's next step report, oldest first.

        Args:
          deadline_s: longest wait, in seconds.

        Returns:
          A report that was not returned before.

        Raises:
          DeadlineError: no report came.
          RunFailedError: the channel is closed and every batch that was sent has been reported.
          BaseException: what `fail` was called with.
        """

        def take() -> StepReport | None:
            if self._reports:
                return self._reports.popleft()
            self._check_more_to_come("report")
            return None

        return await self._until(take, "the trainer's next step report", deadline_s)

    def pending_reports(self) -> list[StepReport]:
        """Return the reports that were handed over and not taken, oldest first, each once; never waits, and says nothing of a failure."""
        with self._changed:
            reports = list(self._reports)
            self._reports.clear()
            return reports

    async def next_version(self, after: int, deadline_s: float) -> int:
        """Return the newest announced policy version, waiting until it is above `after`.

        Args:
          after: the version that the caller already has.
          deadline_s: longest wait, in seconds.

        Returns:
          The newest version; versions between may be skipped.

        Raises:
          DeadlineError: no newer version was announced.
          RunFailedError: the channel is closed and every batch that was sent has been reported.
          BaseException: what `fail` was called with.
        """

        def look() -> int | None:
            if self._newest_version is not None and self._newest_version > after:
                return self._newest_version
            self._check_more_to_come(f"policy version above {after}")
            return None

        return await self._until(look, f"a policy version above {after}", deadline_s)

    def receive(self, timeout_s: float) -> TrainBatch | None:
        """Return the next batch, blocking the calling thread.

        Args:
          timeout_s: longest wait, in seconds.

        Returns:
          The oldest batch that was not received before, or None once the channel is closed and drained.

        Raises:
          DeadlineError: no batch came.
          BaseException: what `fail` was called with.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._batches or self._is_closed,
                min(timeout_s, threading.TIMEOUT_MAX),
            )
            if self._failure is not None:
                raise self._failure
            if self._batches:
                batch = self._batches.popleft()
                self._wake()
                return batch
            if self._is_closed:
                return None
            raise DeadlineError(
                f"the trainer waited {timeout_s:g} s for a train batch from the orchestrator; {self._state()}"
            )

    def report(self, report: StepReport) -> None:
        """Hand a step's report to the orchestrator; never blocks."""
        with self._changed:
            self._reports.append(report)
            self._num_outstanding -= 1
            self._wake()

    def announce(self, version: int) -> None:
        """Say that a policy version can be loaded; never blocks."""
        with self._changed:
            self._newest_version = version if self._newest_version is None else max(self._newest_version, version)
            self._wake()

    def close(self) -> None:
        """Say that no further batch will be sent. Queued batches are still received, and their reports still arrive."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def fail(self, exception: BaseException) -> None:
        """Raise an exception in every present and later wait, on both sides; of several, the first counts."""
        with self._changed:
            if self._failure is None:
                self._failure = exception
            self._wake()

    async def _until(self, ready: Callable[[], T | None], what: str, deadline_s: float) -> T:
        """Return the first result of `ready`, called under the lock after every change, that is not None."""
        timer = asyncio.timeout(deadline_s)
        try:
            async with timer:
                while True:
                    with self._changed:
                        if self._failure is not None:
                            raise self._failure
                        if (result := ready()) is not None:
                            return result
                        waiter = self._new_waiter()
                    try:
                        await waiter
                    finally:
                        with self._changed:
                            self._waiters.discard(waiter)
        except TimeoutError:
            if not timer.expired():  # what `fail` was called with may itself be a timeout
                raise
            with self._changed:
                state = self._state()
            raise DeadlineError(f"the orchestrator waited {deadline_s:g} s for {what}; {state}") from None

    def _new_waiter(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("the channel is bound to another event loop than the one that waits on it")
        waiter = loop.create_future()
        self._waiters.add(waiter)
        return waiter

    def _wake(self) -> None:
        """Wake the waits of both sides; the lock is held."""
        self._changed.notify_all()
        if self._waiters and self._loop is not None:
            # A loop that was closed in the middle of a wait has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_resolve, list(self._waiters))

    def _check_more_to_come(self, what: str) -> None:
        if self._is_closed and self._num_outstanding <= 0:
            raise RunFailedError(
                f"no further {what} will come: the channel to the trainer is closed and every batch was reported"
            )

    def _state(self) -> str:
        version = "no version announced" if self._newest_version is None else f"newest version {self._newest_version}"
        return (
            f"{len(self._batches)} of {self._capacity} batches queued, {self._num_outstanding} sent and not reported, "
            f"{version}; look at the other side's log, or raise the deadline"
        )


def _resolve(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
