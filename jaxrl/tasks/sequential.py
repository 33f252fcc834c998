"""Tasks in the order of their list.

In: a task list. Out: its tasks, first to last, and from the start again unless told to end. What the groups score is
counted and changes no draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.counting import GroupCounters
from jaxrl.tasks.identity import check_state, fingerprint, task_id, unique_task_ids


class SequentialSampler:
    """Draws tasks in their order; implements `TaskSampler`.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      repeat: start again after the last task; False makes iteration stop there, and `sample` return what is left.

    Raises:
      ValueError: no task, or two with one id.

    Example:
      >>> SequentialSampler(["a", "b", "c"]).sample(4)
      ['a', 'b', 'c', 'a']
      >>> list(SequentialSampler(["a", "b", "c"], repeat=False))
      ['a', 'b', 'c']
    """

    def __init__(self, tasks: Sequence[TaskSpec], *, repeat: bool = True) -> None:
        self._tasks = list(tasks)
        self._ids = frozenset(unique_task_ids(self._tasks))
        self._kind = {"type": "sequential", "tasks": fingerprint(self._tasks)}
        self._repeat = repeat
        self._cursor = 0
        self._counters = GroupCounters()

    def sample(self, n: int) -> list[TaskSpec]:
        """Draw the next `n` tasks, `n >= 0`."""
        if n < 0:
            raise ValueError(f"cannot draw {n} tasks")
        drawn = []
        while len(drawn) < n and (self._repeat or self._cursor < len(self._tasks)):
            drawn.append(self._tasks[self._cursor % len(self._tasks)])
            self._cursor += 1
        return drawn

    def __iter__(self) -> Iterator[TaskSpec]:
        """Return itself."""
        return self

    def __next__(self) -> TaskSpec:
        """Draw one task."""
        drawn = self.sample(1)
        if not drawn:
            raise StopIteration
        return drawn[0]

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
        """Return the cursor and the counters as a JSON value."""
        return {**self._kind, "cursor": self._cursor, "counters": self._counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          ValueError: the state is of another kind of sampler or of other tasks; nothing is changed then.
        """
        check_state(state, self._kind, positions=("cursor",))
        counters = GroupCounters.from_state(state.get("counters"))
        self._cursor, self._counters = state["cursor"], counters

    def metrics(self) -> dict[str, float]:
        """Return the counters and the ratios that follow from them."""
        return self._counters.metrics()
