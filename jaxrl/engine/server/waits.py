"""Two waits of the server: until a deadline, and until the client hangs up. Both cancel what they waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from jaxrl.errors import DeadlineError

T = TypeVar("T")


async def within(deadline_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it at the deadline.

    Raises:
      DeadlineError: it was not done by then.
    """
    timer = asyncio.timeout(deadline_s)
    try:
        async with timer:
            return await work
    except TimeoutError as error:
        if not timer.expired():  # the engine's own deadline
            raise
        raise DeadlineError(f"the request did not finish within {deadline_s:g} s (`server.request_deadline_s`)") from error


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client hangs up; the request's body must have been read.

    Raises:
      ClientDisconnect: it did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
