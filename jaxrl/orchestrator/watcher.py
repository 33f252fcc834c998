"""Brings new policy versions from the trainer to the policy, and has the policy measured when that is due.

In: the number of each step that was shipped. Out: the policy at the version of that step, announced once it really is
served. Nothing here decides what to dispatch or what is too old.

    who waits        for what                         unblocked by
    the watcher      a step that was shipped          the orchestrator's main loop; None ends it
    the watcher      a newer version                  the trainer, within the deadline
    the watcher      the policy to take it            the pool's own deadlines
    the watcher      a measurement of this version    its rollouts' own deadlines, or `Evaluations.cancel`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxrl.envs.play import is_cancelled_by_owner
from jaxrl.orchestrator.ports import Evaluate, Policy, TrainerChannel
from jaxrl.orchestrator.rules import is_eval_due, is_eval_due_at_start


class Evaluations:
    """Measures the served version, holding it still meanwhile; one measurement at a time."""

    def __init__(
        self, pool: Policy, evaluate: Evaluate | None, *, every_n_steps: int | None, last_version: int
    ) -> None:
        """Prepare; `evaluate` None measures nothing."""
        self._pool = pool
        self._evaluate = evaluate
        self._every_n_steps = every_n_steps
        self._last_version = last_version
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    @property
    def is_running(self) -> bool:
        """True while the policy is being measured."""
        return self._task is not None

    def is_due(self, previous: int, version: int) -> bool:
        """Say whether the policy is to be measured now that it went from `previous` to `version`."""
        return is_eval_due(previous, version, every_n_steps=self._every_n_steps, last_version=self._last_version)

    def is_due_at_start(self, version: int) -> bool:
        """Say whether the policy is to be measured before anything is drawn; `evaluate` passes over what was measured before a resume."""
        return is_eval_due_at_start(version, every_n_steps=self._every_n_steps, last_version=self._last_version)

    async def run(self) -> None:
        """Measure the version that is served; returns early if `cancel` is called."""
        if self._evaluate is None or self._is_cancelled:
            return
        self._task = asyncio.create_task(self._measure(self._evaluate), name="evaluation")
        try:
            await self._task
        except asyncio.CancelledError:
            if is_cancelled_by_owner() or not self._is_cancelled:
                raise
        finally:
            self._task = None

    def cancel(self) -> None:
        """End a measurement that runs, and start none from here on."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _measure(self, evaluate: Evaluate) -> None:
        async with self._pool.hold_version():
            version = self._pool.version
            await evaluate(step=version, version=version)


async def watch_versions(
    shipped_steps: asyncio.Queue[int | None],
    channel: TrainerChannel,
    pool: Policy,
    evaluations: Evaluations,
    *,
    on_version: Callable[[int], None],
    deadline_s: float,
) -> None:
    """Take the version of each shipped step into the policy, until `shipped_steps` gives None.

    A version that came while a newer one was published is passed over: the policy always takes the newest.

    Args:
      shipped_steps: steps in order.
      channel: where versions are announced.
      pool: the policy.
      evaluations: run here, after the update and before the next one.
      on_version: called once the policy serves the version.
      deadline_s: longest wait for one version.
    """
    while (step := await shipped_steps.get()) is not None:
        while (previous := pool.version) < step:
            version = await channel.next_version(previous, deadline_s)
            await pool.update(version)
            on_version(pool.version)
            if evaluations.is_due(previous, pool.version):
                await evaluations.run()
