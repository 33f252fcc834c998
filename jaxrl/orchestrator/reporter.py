"""Writes down each shipped step: its rollouts at once, and again with its metrics when the trainer has reported it.

In: shipped steps, in order, and the trainer's reports. Out: the step's rollouts, first as they were sent and then with
what the trainer says of their tokens, and one row of metrics. So nothing that was played is lost, whatever ends the run.
It computes no metric but the step's wall time, and never holds up the main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import LoopLag
from jaxrl.orchestrator.ports import StepMonitors, TrainerChannel
from jaxrl.orchestrator.shipping import ShippedStep
from jaxrl.types import StepReport

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reporter:
    """Joins what the orchestrator knows of a step with what the trainer says of it."""

    def __init__(
        self,
        channel: TrainerChannel,
        monitors: StepMonitors,
        *,
        on_report: Callable[[int], None],
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Prepare.

        Args:
          channel: where reports come from.
          monitors: where steps are written down.
          on_report: called with each reported step.
          deadline_s: longest wait for one report.
          clock: seconds.
        """
        self._channel = channel
        self._monitors = monitors
        self._on_report = on_report
        self._deadline_s = deadline_s
        self._clock = clock
        self._lag = LoopLag()
        self._step_started_s = clock()
        self._written: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()
        self._unreported: deque[ShippedStep] = deque()
        # One thread, so that what is known later is written later; and one of its own, so that cancelling the reporter, or a crowd of
        # other work, takes nothing from it.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reporter")

    def add(self, shipped: ShippedStep) -> None:
        """Take a step whose batch is about to be sent; its rollouts are written at once, the steps before it reported or not."""
        self._unreported.append(shipped)
        self._written.put_nowait(self._write(self._monitors.log_rollouts, shipped.step, shipped.rollouts))

    def end(self) -> None:
        """Say that no further step will come."""
        self._written.put_nowait(None)

    def start_clock(self) -> None:
        """Say that the first step begins; later ones begin where the one before is reported."""
        self._step_started_s = self._clock()

    async def run(self) -> None:
        """Report each step that was added, until `end`.

        Raises:
          DeadlineError: the trainer did not report in time.
          RunFailedError: the trainer reported another step.
        """
        lag = asyncio.create_task(self._lag.run(), name="loop lag")
        try:
            while (written := await self._written.get()) is not None:
                await asyncio.shield(written)
                report = await self._channel.next_report(self._deadline_s)
                for writing in self._record(report):
                    await asyncio.shield(writing)
                self._on_report(report.step)
        finally:
            lag.cancel()

    async def close(self) -> None:
        """Wait until everything is written, what the trainer reported just before a failure ended `run` included."""
        await asyncio.wrap_future(self._writer.submit(lambda: None))  # no step may change while it is being written
        late: list[asyncio.Future[None]] = []
        for report in self._channel.pending_reports():
            if not self._unreported or report.step != self._unreported[0].step:
                break
            late += self._record(report)
        await asyncio.to_thread(self._writer.shutdown)
        for outcome in await asyncio.gather(*late, return_exceptions=True):
            if isinstance(outcome, BaseException):  # whatever ended the run is what is raised
                logger.error("a report that came just before the end could not be written down: %r", outcome)

    def _record(self, report: StepReport) -> list[asyncio.Future[None]]:
        """Have the oldest unreported step written down with its report; at once, so that whoever is cancelled while it waits loses nothing.

        Raises:
          RunFailedError: the report is of another step.
        """
        shipped = self._unreported.popleft()
        if report.step != shipped.step:
            raise RunFailedError(f"the trainer reported step {report.step}, but the next step to be reported is {shipped.step}")
        now_s = self._clock()
        own = {names.STEP_S: now_s - self._step_started_s, names.POLICY_VERSION: float(report.version)}
        self._step_started_s = now_s
        shipped.take(report)
        row = shipped.metrics | self._lag.metrics() | own | report.metrics
        return [
            self._write(self._monitors.update_rollouts, shipped.step, shipped.rollouts),
            self._write(self._monitors.log_step, shipped.step, row),
        ]

    def _write(self, write: Callable[[int, T], None], step: int, what: T) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._writer, write, step, what)
