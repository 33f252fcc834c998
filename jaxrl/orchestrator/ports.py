"""What the orchestrator asks of its neighbours: a policy, a channel to the trainer, somewhere to show things.

Protocols only, each as small as its use here; the real classes live in `inference`, `transport` and `monitors`. Nothing
here is implemented, and no concrete class is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np

from jaxrl.types import Rollout, StepReport, TrainBatch, TrainingSample


class ScoringPool(Protocol):
    """A pool that an algorithm may ask for logprobs; it cannot be closed here, since it may be the policy's."""

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return [L] float32 logprobs of [L] tokens, each given those before it; index 0 is 0.0."""
        ...


class ScoringPolicy(ScoringPool, Protocol):
    """The live policy, as an algorithm may ask it."""

    @property
    def version(self) -> int:
        """The version that is served."""
        ...


class ConnectedPool(Protocol):
    """A pool that somebody connected for a run, which closes it. Its `str` says which model it is, and where."""

    async def close(self) -> None:
        """Give back what the pool holds."""
        ...


class Policy(Protocol):
    """The live policy: which version it is, and how it becomes the next one."""

    @property
    def version(self) -> int:
        """The version that every later token is sampled from."""
        ...

    async def update(self, version: int) -> None:
        """Pause, load, resume, and only then say the new `version`."""
        ...

    def hold_version(self) -> AbstractAsyncContextManager[Any]:
        """Delay updates while the block runs."""
        ...


class TrainerChannel(Protocol):
    """The orchestrator's side of the way to the trainer."""

    async def send(self, batch: TrainBatch, deadline_s: float) -> None:
        """Hand over a batch once there is room for it."""
        ...

    async def next_report(self, deadline_s: float) -> StepReport:
        """Wait for the report of the oldest step not yet reported."""
        ...

    def pending_reports(self) -> list[StepReport]:
        """Return the reports that are there and were not taken, whatever failed since."""
        ...

    async def next_version(self, after: int, deadline_s: float) -> int:
        """Wait for a published version above `after`; the newest one."""
        ...

    def close(self) -> None:
        """Say that no further batch will be sent."""
        ...


class StepMonitors(Protocol):
    """Where a step's numbers and rollouts are shown."""

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record one row of metrics; called once per step, in order, in a worker thread."""
        ...

    def log_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts that were decided in `step`; called in a worker thread."""
        ...

    def update_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of `step` again, in place of what was recorded of it; called in a worker thread."""
        ...

    def status(self, text: str) -> None:
        """Show what is being waited for; the empty string for nothing."""
        ...

    def progress(self, phase: str, done: float, total: float) -> None:
        """Show how far a phase is."""
        ...


class Pack(Protocol):
    """The packer with its shapes already bound."""

    def __call__(self, samples: Sequence[TrainingSample], *, step: int) -> TrainBatch:
        """Pack the samples of one step; called in a worker thread."""
        ...


class Evaluate(Protocol):
    """Measures the policy that is being served."""

    async def __call__(self, step: int, version: int) -> None:
        """Measure `version` and log it under `step`, unless that was done before the run was resumed."""
        ...
