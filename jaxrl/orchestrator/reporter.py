"""Writes down each shipped step when the trainer has reported it: its rollouts, then its metrics.

In: shipped steps, in order, and the trainer's reports. Out: the step's rollouts, with what the trainer says of their
tokens, and one row of metrics. Rollouts of a step that is never reported are written when the run ends, and say so. It
computes no metric but the step's wall time, and never holds up the main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import LoopLag
from jaxrl.orchestrator.ports import StepMonitors, TrainerChannel
from jaxrl.orchestrator.shipping import ShippedStep

logger = logging.getLogger(__name__)


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
        self.shipped: asyncio.Queue[ShippedStep | None] = asyncio.Queue()
        """Steps whose batch was sent; written by the main loop, and None ends the reporter."""
        self._unwritten: dict[int, ShippedStep] = {}

    def start_clock(self) -> None:
        """Say that the first step begins; later ones begin where the one before is reported."""
        self._step_started_s = self._clock()

    async def run(self) -> None:
        """Report until `shipped` gives None.

        Raises:
          DeadlineError: the trainer did not report in time.
          RunFailedError: the trainer reported another step.
        """
        lag = asyncio.create_task(self._lag.run(), name="loop lag")
        try:
            while (shipped := await self.shipped.get()) is not None:
                self._unwritten[shipped.step] = shipped
                report = await self._channel.next_report(self._deadline_s)
                if report.step != shipped.step:
                    raise RunFailedError(
                        f"the trainer reported step {report.step}, but the next step to be reported is {shipped.step}"
                    )
                now_s = self._clock()
                shipped.take(report)
                await asyncio.to_thread(self._write, shipped)
                own = {names.STEP_S: now_s - self._step_started_s, names.POLICY_VERSION: float(report.version)}
                self._step_started_s = now_s
                row = shipped.metrics | self._lag.metrics() | own | report.metrics
                await asyncio.to_thread(self._monitors.log_step, shipped.step, row)
                self._on_report(report.step)
        finally:
            lag.cancel()

    async def close(self) -> None:
        """Write the rollouts of the steps that were sent and will not be reported; call it once `run` has ended."""
        self._take_what_waits()
        await asyncio.to_thread(self._write_rest)

    def abandon(self) -> None:
        """Do the same at once, from the event loop's thread, for a process that is about to end."""
        self._take_what_waits()
        self._write_rest()

    def _take_what_waits(self) -> None:
        while not self.shipped.empty():
            shipped = self.shipped.get_nowait()
            if shipped is not None:
                self._unwritten[shipped.step] = shipped

    def _write_rest(self) -> None:
        rest = list(self._unwritten.values())
        unreported = [str(shipped.step) for shipped in rest if not shipped.is_reported]
        if unreported:
            logger.warning("no report came of step %s: its rollouts are written without the trainer's logprobs", ", ".join(unreported))
        for shipped in rest:
            self._write(shipped)

    def _write(self, shipped: ShippedStep) -> None:
        """Write the rollouts of a step, once: a cancelled reporter may leave them to its worker thread or to `close`."""
        if self._unwritten.pop(shipped.step, None) is not None:
            self._monitors.log_rollouts(shipped.step, shipped.rollouts)
