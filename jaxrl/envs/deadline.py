"""The clock of one rollout's deadline, which stands still while the rollout waits its turn for something that others use.

In: the deadline of whoever plays, a wait inside of it. Out: a deadline that is later by as long as the wait took. What waits has a
deadline of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("rollout_deadline", default=None)


@contextlib.contextmanager
def rollout_deadline(deadline: asyncio.Timeout) -> Iterator[None]:
    """Make `deadline` the one that `waiting_its_turn` moves, for what is called in the body of the `with`."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextlib.contextmanager
def waiting_its_turn() -> Iterator[None]:
    """Stop the clock of the rollout's deadline for the body of the `with`; one wait at a time. Without a deadline, do nothing."""
    deadline = _deadline.get()
    when_s = None if deadline is None or deadline.expired() else deadline.when()
    if deadline is None or when_s is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    started_s = clock()
    deadline.reschedule(None)
    try:
        yield
    finally:
        deadline.reschedule(when_s + clock() - started_s)
