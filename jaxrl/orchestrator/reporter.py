"""Writes down each shipped step: its rollouts at once, and again with its metrics when the trainer has reported it.

In: shipped steps, in order, and the trainer's reports. Out: the step's rollouts, first as they were sent and then with
what the trainer says of their tokens, and one row of metrics. So nothing that was played is lost, whatever ends the run.
It computes no metric but the step's wall time, and never holds up the main loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import LoopLag
from jaxrl.orchestrator.ports import StepMonitors, TrainerChannel
from jaxrl.orchestrator.shipping import ShippedStep

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
        self._shipped: asyncio.Queue[tuple[ShippedStep, asyncio.Future[None]] | None] = asyncio.Queue()
        # One thread, so that what is known later is written later; and one of its own, so that cancelling the reporter, or a crowd of
        # other work, takes nothing from it.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reporter")

    def add(self, shipped: ShippedStep) -> None:
        """Take a step whose batch is about to be sent; its rollouts are written at once, the steps before it reported or not."""
        self._shipped.put_nowait((shipped, self._write(self._monitors.log_rollouts, shipped.step, shipped.rollouts)))

    def end(self) -> None:
        """Say that no further step will come."""
        self._shipped.put_nowait(None)

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
            while (added := await self._shipped.get()) is not None:
                shipped, written = added
                await asyncio.shield(written)
                report = await self._channel.next_report(self._deadline_s)
                if report.step != shipped.step:
                    raise RunFailedError(
                        f"the trainer reported step {report.step}, but the next step to be reported is {shipped.step}"
                    )
                now_s = self._clock()
                own = {names.STEP_S: now_s - self._step_started_s, names.POLICY_VERSION: float(report.version)}
                self._step_started_s = now_s
                shipped.take(report)
                await asyncio.shield(self._write(self._monitors.update_rollouts, shipped.step, shipped.rollouts))
                row = shipped.metrics | self._lag.metrics() | own | report.metrics
                await asyncio.shield(self._write(self._monitors.log_step, shipped.step, row))
                self._on_report(report.step)
        finally:
            lag.cancel()

    async def close(self) -> None:
        """Wait until everything is written."""
        await asyncio.to_thread(self._writer.shutdown)

    def _write(self, write: Callable[[int, T], None], step: int, what: T) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._writer, write, step, what)
