"""Functions that tests offer as tools; they run in worker processes."""

import datetime
import os
import time
from typing import Any, Literal


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Tells the weather
    of a city.

    Not for the policy.
    """
    return f"{city}: {20 * days} {unit} {tags or ''}".strip()


def as_json(value: float) -> dict[str, Any]:
    """Returns an object."""
    return {"twice": 2 * value}


async def later(text: str) -> str:
    """Is a coroutine function."""
    return text[::-1]


def act(what: str) -> Any:
    """Misbehaves as it is told."""
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ValueError("no such place")
    if what == "much":
        return "x" * 10_000_000
    if what == "object":
        return object()
    if what == "surrogate":
        return "a\udc80b"
    return what


def by_position(text: str, /) -> str:
    """Cannot be called with names."""
    return text


def loose(when: datetime.date, *more: str, numbers: list[float] = [], either: int | str = 0, **others: object) -> str:  # noqa: B006
    return ""
