"""Reading a saved state of a task sampler: whether it is of this one, and whether its values can be.

In: what a `load_state_dict` was given, or a `state_dict` gave. Out: the values, or which one is wrong, in words. What they mean, each
sampler knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MAX_PATH_CHARS = 500
"""Of a longer path only the beginning is named: a list that holds itself has no end."""


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
        raise damaged(f"it has no {missing[0]!r}")
    if unknown := sorted(map(str, set(state) - set(settings) - set(holds))):
        raise ValueError(f"the state is of another task sampler: this one knows no {unknown[0]!r}")


def checked_count(value: object, what: str) -> int:
    """Return a number of a saved state; raises ValueError unless it is an integer >= 0.

    Example:
      >>> checked_count(3, "'cursor'")
      3
    """
    if type(value) is not int or value < 0:
        raise damaged(f"{what} is {value!r}, expected an integer >= 0")
    return value


def checked_number(value: object, what: str) -> float:
    """Return a number of a saved state; raises ValueError unless it is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise damaged(f"{what} is {value!r}, expected a number >= 0")
    return value


def first_no_json(value: object, path: str = "") -> str:
    """Say where a value first is something that JSON would not give back, and what is there; the empty text if it is JSON throughout.

    Example:
      >>> first_no_json({"at": 1, "seen": [{"order": (2, 3)}]})
      '`seen[0].order` is a tuple, (2, 3)'
    """
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return ""
    if len(path) > MAX_PATH_CHARS:
        return f"`{path[:MAX_PATH_CHARS]}...` goes deeper than can be written"
    if isinstance(value, dict):
        for key, held in value.items():
            if not isinstance(key, str):
                return f"`{path}` has the key {key!r:.80}, of type {type(key).__name__}" if path else f"it has the key {key!r:.80}"
            if found := first_no_json(held, f"{path}.{key}" if path else key):
                return found
        return ""
    if isinstance(value, list):
        return next((found for index, held in enumerate(value) if (found := first_no_json(held, f"{path}[{index}]"))), "")
    where = f"`{path}`" if path else "it"
    return f"{where} is {value!r}, no finite number" if isinstance(value, float) else f"{where} is a {type(value).__name__}, {value!r:.80}"


def damaged(how: str) -> ValueError:
    """Return the error of a saved state that no sampler can have written."""
    return ValueError(f"the state of the task sampler is damaged: {how}")
