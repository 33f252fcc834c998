"""What samplers over a finite list of tasks have in common: drawing by index, counting groups, a state that knows its tasks.

In: a task list and the settings of a sampler. Out: a base class that leaves a sampler to say which index is next and what it remembers
and, if it learns, what from. Nothing here picks a task.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.counting import GroupCounters
from jaxrl.tasks.identity import fingerprint, task_id, unique_task_ids
from jaxrl.tasks.saved import check_state


class ScoredGroup(NamedTuple):
    """What a sampler may learn from one group."""

    index: int
    """Which task of the list it attempted."""
    rewards: list[float]
    """The rewards that are there; a missing one is left out."""
    num_rollouts: int
    """Its rollouts, scored or not."""
    cost: float | None
    """What its rollouts cost together; None where costs are not reported. It is to be counted, and to weigh nothing."""


class FiniteSampler(ABC):
    """Base of samplers that pick from a list; implements `TaskSampler` once `next_index`, `memory` and `remember` are there.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      kind: name of the sampler in its state.
      **settings: what else its draws depend on, as JSON values; a state of other settings is refused.

    Raises:
      ValueError: no task, or two with one id.

    Example:
      >>> class Backwards(FiniteSampler):
      ...     def __init__(self, tasks):
      ...         super().__init__(tasks, "backwards")
      ...         self.num_draws = 0
      ...
      ...     def next_index(self):
      ...         self.num_draws += 1
      ...         return -self.num_draws % len(self.tasks)
      ...
      ...     def memory(self):
      ...         return {"num_draws": self.num_draws}
      ...
      ...     def remember(self, memory):
      ...         self.num_draws = memory["num_draws"]
      >>> Backwards(["a", "b", "c"]).sample(4)
      ['c', 'b', 'a', 'c']
    """

    def __init__(self, tasks: Sequence[TaskSpec], kind: str, **settings: Any) -> None:
        self.tasks = list(tasks)
        """What is picked from."""
        self._index = {identity: index for index, identity in enumerate(unique_task_ids(self.tasks))}
        self._settings = {"type": kind, "tasks": fingerprint(self.tasks), **settings}
        self._counters = GroupCounters()

    @abstractmethod
    def next_index(self) -> int:
        """Return the index of the next task; a StopIteration says that there is none."""

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """Return what later draws depend on, as a JSON value."""

    @abstractmethod
    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up what `memory` returned, which has the same keys; raises ValueError, and changes nothing, if it is damaged."""

    def learn(self, group: ScoredGroup) -> None:  # noqa: B027
        """Learn from a scored group; by default nothing."""

    def sample(self, n: int) -> list[TaskSpec]:
        """Draw the next `n` tasks, `n >= 0`; there are fewer only where they have an end."""
        if n < 0:
            raise ValueError(f"cannot draw {n} tasks")
        return list(islice(self, n))

    def __iter__(self) -> Iterator[TaskSpec]:
        """Return itself."""
        return self

    def __next__(self) -> TaskSpec:
        """Draw one task.

        Raises:
          StopIteration: there is no task left.
          ValueError: `next_index` gave something else than an index.
        """
        index = self.next_index()
        try:
            return self.tasks[index]
        except (IndexError, TypeError) as error:
            raise ValueError(
                f"`next_index` of {type(self).__name__} returned {index!r:.80}; expected an index into its {len(self.tasks)} "
                f"tasks, an integer from 0 to {len(self.tasks) - 1}"
            ) from error

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        """Count one scored group and learn from it.

        Raises:
          KeyError: the task is not in the list.
          ValueError: see `GroupCounters.add`.
        """
        identity = task_id(task)
        if identity not in self._index:
            raise KeyError(f"task {identity!r} is not one of the sampler's {len(self.tasks)} tasks")
        scored = self._counters.add(rewards, costs)
        self.learn(ScoredGroup(self._index[identity], scored, len(rewards), None if costs is None else math.fsum(costs)))

    def state_dict(self) -> dict[str, Any]:
        """Return all that later draws and metrics depend on, as a JSON value."""
        return {**self._settings, **self.memory(), "counters": self._counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          ValueError: the state is damaged, or of another kind of sampler, of other tasks or of other settings; nothing is changed then.
        """
        keys = list(self.memory())
        check_state(state, self._settings, holds=(*keys, "counters"))
        counters = GroupCounters.from_state(state["counters"])
        self.remember({key: state[key] for key in keys})
        self._counters = counters

    def metrics(self) -> dict[str, float]:
        """Return the counters and the ratios that follow from them."""
        return self._counters.metrics()
