"""Tasks in the order of their list.

In: a task list, and seeds if each task is to be played under several. Out: its tasks, first to last, and from the start again unless told
to end. What the groups score is counted and changes no draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.finite import FiniteSampler
from jaxrl.tasks.saved import checked_count


class SequentialSampler(FiniteSampler):
    """Draws tasks in their order; implements `TaskSampler`.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      seeds: draw each task once for each of these, one seed after the other, as a copy of its spec with a `seed`; None draws the specs
        themselves.
      repeat: start again after the last task; False makes iteration stop there, and `sample` return what is left.

    Raises:
      ValueError: no task, two with one id, no seed or one twice, or a spec that has no place for a seed.

    Example:
      >>> SequentialSampler(["a", "b", "c"]).sample(4)
      ['a', 'b', 'c', 'a']
      >>> list(SequentialSampler([{"id": "a"}, {"id": "b"}], seeds=[0, 7], repeat=False))
      [{'id': 'a', 'seed': 0}, {'id': 'a', 'seed': 7}, {'id': 'b', 'seed': 0}, {'id': 'b', 'seed': 7}]
    """

    def __init__(self, tasks: Sequence[TaskSpec], seeds: Sequence[int] | None = None, *, repeat: bool = True) -> None:
        super().__init__(tasks, "sequential", seeds=None if seeds is None else _checked_seeds(seeds), repeat=repeat)
        if seeds is not None:
            for spec in self.tasks:
                if not isinstance(spec, Mapping) or "seed" in spec:
                    raise ValueError(f"`seeds` gives each task a `seed`, and {spec!r:.80} has one, or has no keys; leave `seeds` out")
        self._seeds = None if seeds is None else list(seeds)
        self._repeat = repeat
        self._cursor = 0

    def next_index(self) -> int:
        """Return the index of the next task."""
        num_seeds = len(self._seeds or [None])
        if not self._repeat and self._cursor >= len(self.tasks) * num_seeds:
            raise StopIteration
        self._cursor += 1
        return (self._cursor - 1) // num_seeds % len(self.tasks)

    def __next__(self) -> TaskSpec:
        """Draw one task."""
        drawn = self._cursor
        spec = super().__next__()
        return spec if self._seeds is None else {**spec, "seed": self._seeds[drawn % len(self._seeds)]}

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        """Count one scored group; under which seed it was played is not told apart.

        Raises:
          KeyError: the task is not in the list.
          ValueError: see `GroupCounters.add`.
        """
        if self._seeds is not None and isinstance(task, Mapping):
            task = {key: value for key, value in task.items() if key != "seed"}
        super().update(task, rewards, costs)

    def memory(self) -> dict[str, Any]:
        """Return the cursor."""
        return {"cursor": self._cursor}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up a cursor."""
        self._cursor = checked_count(memory["cursor"], "'cursor'")


def _checked_seeds(seeds: Sequence[int]) -> list[int]:
    if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds` needs at least one integer, each once, got {list(seeds)!r}")
    return list(seeds)
