"""What makes two tasks the same, and two lists of tasks.

In: task specs, any JSON values. Out: ids, and one fingerprint of a whole list. Nothing here draws or counts.
"""

from __future__ import annotations

import hashlib
import json
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


def fingerprint(tasks: Sequence[TaskSpec], *, allow_nan: bool = False) -> str:
    """Return a hash of a whole task list, its order included, by which a saved state knows its tasks.

    Args:
      tasks: JSON values.
      allow_nan: take NaN and infinity, which are none, for values; a checkpoint could not hold them.

    Raises:
      ValueError: a task is no JSON value.
    """
    return _digest(list(tasks), allow_nan=allow_nan)


def _digest(value: object, *, allow_nan: bool = True) -> str:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a task must be a JSON value (text, finite number, true, false, null, list, dict by text): {error}") from error
    # A file of JSON may hold half a surrogate pair, which UTF-8 has no bytes for.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
