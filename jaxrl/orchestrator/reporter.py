"""Writes down each shipped step: its rollouts at once, its metrics when the trainer has reported it.

In: shipped steps, in order, and the trainer's reports. Out: one row of metrics per step. It computes no metric but the
step's wall time, and never holds up the main loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import LoopLag
from jaxrl.orchestrator.ports import StepMonitors, TrainerChannel
from jaxrl.orchestrator.shipping import ShippedStep


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
                await asyncio.to_thread(self._monitors.log_rollouts, shipped.step, shipped.rollouts)
                report = await self._channel.next_report(self._deadline_s)
                if report.step != shipped.step:
                    raise RunFailedError(
                        f"the trainer reported step {report.step}, but the next step to be reported is {shipped.step}"
                    )
                now_s = self._clock()
                own = {names.STEP_S: now_s - self._step_started_s, names.POLICY_VERSION: float(report.version)}
                self._step_started_s = now_s
                row = shipped.metrics | self._lag.metrics() | own | report.metrics
                await asyncio.to_thread(self._monitors.log_step, shipped.step, row)
                self._on_report(report.step)
        finally:
            lag.cancel()
