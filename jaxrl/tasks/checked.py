"""A sampler of the user's own, watched: what it draws is one of its tasks, what it remembers is JSON, its groups are counted.

In: a sampler and its task list. Out: the same draws, or an error in words where a run could not tell what it was handed. What the sampler
itself raises is left as it is.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.tasks.base import TaskSampler, TaskSpec
from jaxrl.tasks.counting import GroupCounters
from jaxrl.tasks.identity import fingerprint, task_id, unique_task_ids
from jaxrl.tasks.saved import check_state, damaged, first_no_json

_OF_THE_RUN = ("admission_frac", "missing_costs")
"""What the run itself reports under `tasks/<env>/`, with all that begins with `gate/`."""


class CheckedSampler:
    """Draws what another sampler draws; implements `TaskSampler`.

    It counts groups itself, so the other one need not; what that one reports under the same name stands.

    Args:
      sampler: picks from the tasks.
      tasks: at least one, with distinct ids. A task that is drawn has the id of one of them.
      where: what the sampler is called in messages.
      kwargs: what else it was called with; a state that was made with others is refused.

    Raises:
      ValueError: no task, two with one id, or a sampler whose state is no JSON value.
    """

    def __init__(self, sampler: TaskSampler, tasks: Sequence[TaskSpec], where: str, kwargs: Mapping[str, Any] | None = None) -> None:
        self._sampler = sampler
        self._ids = frozenset(unique_task_ids(tasks))
        self._settings = {"type": "python", "sampler": where, "tasks": fingerprint(tasks)}
        # Hashes: an argument may be a secret, which no checkpoint is to hold; and TOML knows dates, which JSON does not.
        self._kwargs = {name: fingerprint([json.dumps(value, sort_keys=True, default=str)]) for name, value in (kwargs or {}).items()}
        self._where = where
        self._counters = GroupCounters()
        self.state_dict()

    def sample(self, n: int) -> list[TaskSpec]:
        """Draw `n` tasks; there are fewer only where they have an end.

        Raises:
          ValueError: what was drawn is no list of at most `n` tasks that are known.
        """
        drawn = self._sampler.sample(n)
        if not isinstance(drawn, list | tuple):
            raise ValueError(f"`sample({n})` of {self._where} returned a {type(drawn).__name__}; expected a list of {n} tasks")
        if len(drawn) > n:
            raise ValueError(f"`sample({n})` of {self._where} returned {len(drawn)} tasks; expected {n}")
        for spec in drawn:
            if self._id_of(spec) not in self._ids:
                raise ValueError(
                    f"`sample({n})` of {self._where} returned {spec!r:.80}, which is none of its {len(self._ids)} tasks; return them as "
                    "they were given, or copies with the same `id`"
                )
        return list(drawn)

    def __iter__(self) -> Iterator[TaskSpec]:
        """Return itself."""
        return self

    def __next__(self) -> TaskSpec:
        """Draw one task; see `sample`."""
        drawn = self.sample(1)
        if not drawn:
            raise StopIteration
        return drawn[0]

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        """Count one scored group, and hand it on.

        Raises:
          KeyError: the task is not in the list.
          ValueError: see `GroupCounters.add`.
        """
        if task_id(task) not in self._ids:
            raise KeyError(f"task {task_id(task)!r} is not one of the sampler's {len(self._ids)} tasks")
        self._counters.add(rewards, costs)
        self._sampler.update(task, list(rewards), None if costs is None else list(costs))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the sampler's state, with the counters.

        Raises:
          ValueError: the sampler's state is not what JSON would give back.
        """
        state = self._sampler.state_dict()
        told = f"`state_dict()` of {self._where} must return a JSON value, so that a checkpoint can hold it"
        try:
            copied = json.loads(json.dumps(state, allow_nan=False))
            is_json = copied == state
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{told}: {first_no_json(state) or error}") from error
        if not is_json:
            culprit = first_no_json(state) or f"{state!r:.200} comes back as another value"
            raise ValueError(f"{told}: {culprit}; a tuple becomes a list, and a key that is a number a text")
        return {**self._settings, "kwargs": self._kwargs, "state": copied, "counters": self._counters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          ValueError: the state is damaged, or of another sampler, of other tasks or of other `kwargs`; the sampler has not seen it then.
        """
        check_state(state, self._settings, holds=("kwargs", "state", "counters"))
        saved = state["kwargs"]
        if not isinstance(saved, dict):
            raise damaged(f"'kwargs' is {saved!r:.80}")
        if changed := sorted(name for name in {**saved, **self._kwargs} if saved.get(name) != self._kwargs.get(name)):
            raise ValueError(f"the state is of another task sampler: {self._where} was called with another `tasks.kwargs.{changed[0]}`")
        counters = GroupCounters.from_state(state["counters"])
        self._sampler.load_state_dict(state["state"])
        self._counters = counters

    def metrics(self) -> dict[str, float]:
        """Return the counters, what follows from them, and what the sampler reports.

        Raises:
          ValueError: the sampler reports something else than finite numbers by name, or under a name that is the run's.
        """
        reported = self._sampler.metrics()
        if not isinstance(reported, dict):
            raise ValueError(f"`metrics()` of {self._where} returned a {type(reported).__name__}; expected a dict of numbers by name")
        for name, value in reported.items():
            if not isinstance(name, str) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(f"`metrics()` of {self._where} holds {value!r:.80} under {name!r}; expected a finite number under a text")
            if name in _OF_THE_RUN or name.startswith("gate/"):
                raise ValueError(f"`metrics()` of {self._where} holds {name!r}, under which the run reports a number of its own; rename it")
        return {**self._counters.metrics(), **{name: float(value) for name, value in reported.items()}}

    def _id_of(self, spec: TaskSpec) -> str | None:
        """Return the id of what was drawn; None if it is no JSON value, and so no task."""
        try:
            return task_id(spec)
        except (TypeError, ValueError, RecursionError):
            return None
