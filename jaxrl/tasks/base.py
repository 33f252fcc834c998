"""Which task next: the protocol of every task sampler.

A sampler owns a finite list of task specs and hands them out; it sees every scored group before any gate or filter.
State is JSON, so that a checkpoint can hold it. Nothing here knows rollouts, environments or advantages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

TaskSpec = Any
"""Any JSON value; `id` names it where it is a mapping with that key."""


@runtime_checkable
class TaskSampler(Protocol):
    """Draws tasks, and learns from scored groups. Not thread-safe: owned by the orchestrator's event loop."""

    def sample(self, n: int) -> list[TaskSpec]:
        """Draw `n` tasks; equals `n` times `sample(1)`."""
        ...

    def __iter__(self) -> Iterator[TaskSpec]:
        """Return itself."""
        ...

    def __next__(self) -> TaskSpec:
        """Draw one task."""
        ...

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        """Learn from one scored group.

        Args:
          task: the task, as it was drawn.
          rewards: one per rollout; None where it is missing.
          costs: one per rollout, given for every group or for none.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value from which `load_state_dict` restores every later draw; a copy, which no later call changes."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; raises ValueError, and changes nothing, when it is of other tasks."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the counters of `tasks.counting.GroupCounters` and the ratios that follow from them."""
        ...
