"""Every task once per epoch, each epoch in an order of its own: the baseline of training.

In: a task list and a seed. Out: its tasks, shuffled without replacement. The order of epoch `e` depends on (seed, e)
alone, so epoch and cursor are the whole state of the draws. What the groups score is counted and changes no draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.counting import GroupCounters
from jaxrl.tasks.identity import check_state, fingerprint, task_id, unique_task_ids


class UniformSampler:
    """Draws every task once per epoch; implements `TaskSampler`.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      rng_seed: seed of the epochs' orders, `>= 0`.

    Raises:
      ValueError: no task, two with one id, or a negative seed.

    Example:
      >>> sorted(UniformSampler(["a", "b", "c"], rng_seed=0).sample(3))
      ['a', 'b', 'c']
    """

    def __init__(self, tasks: Sequence[TaskSpec], rng_seed: int = 0) -> None:
        if rng_seed < 0:
            raise ValueError(f"`rng_seed` must be >= 0, got {rng_seed}")
        self._tasks = list(tasks)
        self._ids = frozenset(unique_task_ids(self._tasks))
        self._kind = {"type": "uniform", "tasks": fingerprint(self._tasks), "rng_seed": rng_seed}
        self._rng_seed = rng_seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)
        self._counters = GroupCounters()

    def sample(self, n: int) -> list[TaskSpec]:
        """Draw the next `n` tasks, `n >= 0`."""
        if n < 0:
            raise ValueError(f"cannot draw {n} tasks")
        return [self._draw() for _ in range(n)]

    def __iter__(self) -> Iterator[TaskSpec]:
        """Return itself."""
        return self

    def __next__(self) -> TaskSpec:
        """Draw one task; there always is one."""
        return self._draw()

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        """Count one scored group.

        Raises:
          KeyError: the task is not in the list.
          ValueError: see `GroupCounters.add`.
        """
        if task_id(task) not in self._ids:
            raise KeyError(f"task {task_id(task)!r} is not one of the sampler's {len(self._tasks)} tasks")
        self._counters.add(rewards, costs)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, cursor and counters as a JSON value."""
        return {**self._kind, "epoch": self._epoch, "cursor": self._cursor, "counters": self._counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          ValueError: the state is of another kind of sampler, of other tasks or of another seed; nothing is changed
            then.
        """
        check_state(state, self._kind, positions=("epoch", "cursor"))
        if state["cursor"] >= len(self._tasks):
            raise ValueError(f"the state of the task sampler is damaged: cursor {state['cursor']} of {len(self._tasks)} tasks")
        counters = GroupCounters.from_state(state.get("counters"))
        self._epoch, self._cursor, self._counters = state["epoch"], state["cursor"], counters
        self._order = self._order_of(self._epoch)

    def metrics(self) -> dict[str, float]:
        """Return the counters and the ratios that follow from them."""
        return self._counters.metrics()

    def _draw(self) -> TaskSpec:
        task = self._tasks[self._order[self._cursor]]
        self._cursor += 1
        if self._cursor == len(self._tasks):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return task

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the permutation [num_tasks] int64 of an epoch."""
        return np.random.default_rng(np.random.SeedSequence([self._rng_seed, epoch])).permutation(len(self._tasks))
