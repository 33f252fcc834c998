"""Which tasks are of one kind: those that share a key.

In: a task list and what its tasks are told apart by. Out: one key per task, as text. A list without the key that was asked for is told
apart by the next one, `difficulty`, `group`, `id`: the whole list, since tiers and single tasks in one table would not be comparable.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.identity import task_id

logger = logging.getLogger(__name__)

KeyName = Literal["difficulty", "group", "id"]
KeyFunction = Callable[[TaskSpec], "str | float"]

KEY_NAMES: tuple[KeyName, ...] = ("difficulty", "group", "id")
"""In the order in which a list that lacks one falls back to the next."""
MAX_NAMED = 3
"""Tasks that an error message names."""


class TaskKeys(NamedTuple):
    """How the tasks of a list are told apart."""

    name: str
    """What by: one of `KEY_NAMES`, or `function`."""
    keys: list[str]
    """One per task."""


def keys_of(tasks: Sequence[TaskSpec], key: KeyName | KeyFunction) -> TaskKeys:
    """Return the key of every task.

    Args:
      tasks: any JSON values; `difficulty` and `group` are looked for in those that are mappings, null is not there.
      key: what they are told apart by, or a function of a task.

    Raises:
      ValueError: there is no such key, some tasks have it and others do not, or a value of it is neither a finite number nor a text.

    Example:
      >>> keys_of([{"id": "a", "difficulty": 1}, {"id": "b", "difficulty": 1.0}, {"id": "c", "difficulty": "hard"}], "difficulty")
      TaskKeys(name='difficulty', keys=['1', '1', 'hard'])
      >>> keys_of([{"id": "a"}, {"id": "b"}], "id").keys
      ['a', 'b']
    """
    if not isinstance(key, str):
        return TaskKeys("function", [_text(key(spec), spec, "the key") for spec in tasks])
    if key not in KEY_NAMES:
        raise ValueError(f"`key` must be one of {', '.join(KEY_NAMES)} or a function of a task, got {key!r}")
    wanted = KEY_NAMES[KEY_NAMES.index(key) : -1]
    for name in wanted:
        values = [spec.get(name) if isinstance(spec, Mapping) else None for spec in tasks]
        without = [task_id(spec) for spec, value in zip(tasks, values, strict=True) if value is None]
        if not without:
            _tell_of_fallback(wanted[: wanted.index(name)], name)
            return TaskKeys(name, [_text(value, spec, f"`{name}`") for spec, value in zip(tasks, values, strict=True)])
        if len(without) < len(tasks):
            named = ", ".join(map(repr, without[:MAX_NAMED])) + (", ..." if len(without) > MAX_NAMED else "")
            raise ValueError(
                f"{len(without)} of {len(tasks)} tasks have no `{name}` ({named}); give every task one, or choose another `key`"
            )
    _tell_of_fallback(wanted, "id")
    return TaskKeys("id", [task_id(spec) for spec in tasks])


def _tell_of_fallback(lacking: Sequence[str], name: str) -> None:
    if lacking:
        logger.warning("no task has a %s: tasks are told apart by `%s`", " or a ".join(f"`{key}`" for key in lacking), name)


def _text(value: object, spec: TaskSpec, what: str) -> str:
    """Return a key as text: 1 and 1.0 are one key."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    raise ValueError(f"{what} of task {task_id(spec)!r} is {value!r}; expected a finite number, or a text that is not empty")
