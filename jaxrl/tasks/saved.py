"""Reading a saved state of a task sampler: whether it is of this one, and whether its values can be.

In: what a `load_state_dict` was given. Out: the values, or an error that says which one is wrong. What they mean, each sampler knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


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


def damaged(how: str) -> ValueError:
    """Return the error of a saved state that no sampler can have written."""
    return ValueError(f"the state of the task sampler is damaged: {how}")
