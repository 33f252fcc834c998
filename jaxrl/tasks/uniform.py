"""Every task once per epoch, each epoch in an order of its own: the baseline of training.

In: a task list and a seed. Out: its tasks, shuffled without replacement. The order of epoch `e` depends on (seed, e)
alone, so epoch and cursor are the whole state of the draws. What the groups score is counted and changes no draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.finite import FiniteSampler
from jaxrl.tasks.randomness import checked_seed
from jaxrl.tasks.saved import checked_count, damaged


class UniformSampler(FiniteSampler):
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
        super().__init__(tasks, "uniform", rng_seed=checked_seed(rng_seed))
        self._rng_seed = rng_seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)

    def next_index(self) -> int:
        """Return the index of the next task; there always is one."""
        index = int(self._order[self._cursor])
        self._cursor += 1
        if self._cursor == len(self.tasks):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return index

    def memory(self) -> dict[str, Any]:
        """Return epoch and cursor."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up an epoch and a cursor."""
        epoch, cursor = (checked_count(memory[key], repr(key)) for key in ("epoch", "cursor"))
        if cursor >= len(self.tasks):
            raise damaged(f"cursor {cursor} of {len(self.tasks)} tasks")
        self._epoch, self._cursor = epoch, cursor
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the permutation [num_tasks] int64 of an epoch."""
        return np.random.default_rng(np.random.SeedSequence([self._rng_seed, epoch])).permutation(len(self.tasks))
