"""What makes two tasks the same, and whether a saved state is of these tasks.

In: task specs, any JSON values, and saved states. Out: ids, one fingerprint of a whole list, an error. Nothing here
draws or counts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from jaxrl.tasks.base import TaskSpec
from jaxrl.types import Task


def task_id(spec: TaskSpec) -> str:
    """Return the identity of a task: its `id` if it is a mapping that has one, else a hash of its canonical JSON.

    Example:
      >>> task_id({"id": "sum-1", "question": "1 + 1"})
      'sum-1'
      >>> task_id({"a": 1, "b": 2}) == task_id({"b": 2, "a": 1})
      True
    """
    if isinstance(spec, Mapping) and spec.get("id") is not None:
        return str(spec["id"])
    return _digest(spec)


def task_of(env_name: str, spec: TaskSpec) -> Task:
    """Return what a task spec of an environment is to a rollout.

    Example:
      >>> task_of("sums", {"id": "sum-1", "question": "1 + 1"}).id
      'sum-1'
    """
    return Task(env_name=env_name, id=task_id(spec), spec=spec)


def unique_task_ids(tasks: Sequence[TaskSpec]) -> list[str]:
    """Return the ids of a task list.

    Raises:
      ValueError: the list is empty, or two tasks have one id, so that a result could not be told to belong to one of
        them.
    """
    ids = [task_id(spec) for spec in tasks]
    if not ids:
        raise ValueError("a task sampler needs at least one task, got none")
    seen: set[str] = set()
    for index, identity in enumerate(ids):
        if identity in seen:
            raise ValueError(f"two tasks have the id {identity!r} (the second at index {index}); give every task an `id` of its own")
        seen.add(identity)
    return ids


def fingerprint(tasks: Sequence[TaskSpec]) -> str:
    """Return a hash of a whole task list, its order included, by which a saved state knows its tasks."""
    return _digest(list(tasks))


def check_state(state: object, settings: Mapping[str, object], holds: Sequence[str]) -> None:
    """Refuse a saved state that is not of this sampler.

    Args:
      state: what a `load_state_dict` was given.
      settings: keys whose values must be equal: the kind of sampler, the fingerprint of its tasks, what else its draws depend on.
      holds: the other keys, all of which it must have.

    Raises:
      ValueError: says which key differs.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of a task sampler is a dict, got {type(state).__name__}")
    for key, value in settings.items():
        if state.get(key) != value:
            raise ValueError(f"the state is of another task sampler: {key!r} is {state.get(key)!r}, expected {value!r}")
    if missing := [key for key in holds if key not in state]:
        raise ValueError(f"the state of the task sampler is damaged: it has no {missing[0]!r}")
    if unknown := sorted(map(str, set(state) - set(settings) - set(holds))):
        raise ValueError(f"the state is of another task sampler: this one knows no {unknown[0]!r}")


def checked_count(value: object, what: str) -> int:
    """Return a number of a saved state; raises ValueError unless it is an integer >= 0.

    Example:
      >>> checked_count(3, "'cursor'")
      3
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"the state of the task sampler is damaged: {what} is {value!r}, expected an integer >= 0")
    return value


def checked_number(value: object, what: str) -> float:
    """Return a number of a saved state; raises ValueError unless it is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"the state of the task sampler is damaged: {what} is {value!r}, expected a number >= 0")
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
