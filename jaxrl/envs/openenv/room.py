"""Who may open a session next, where a server has room for some only.

In: rollouts that come and go, the server's refusals. Out: each rollout's turn, first come, first served. How much room there is is learnt:
after a refusal, those who wait go in as others leave, and now and then one tries whether there is more room than that, since other clients
of the server come and go, too. So a crowd that waits is no crowd that knocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Between two tries for more room; it doubles with each refusal."""


class Room:
    """Counts the sessions of one server. Used from one event loop at a time; what waited in one that ended waits no more.

    Args:
      max_sessions: how many there may be at the same time; None leaves it to the server.
    """

    def __init__(self, max_sessions: int | None = None) -> None:
        self._most = max_sessions
        self._learnt: int | None = None
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pause_s = FIRST_PAUSE_S
        self._next_try: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def taken(self) -> int:
        """Places that are taken now."""
        return self._taken

    async def enter(self, *, again: bool = False) -> None:
        """Wait for a place and take it.

        Args:
          again: was refused before, and goes to the head of the line.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a timer of a loop that ended would never try
            self._loop, self._next_try = loop, None
            self._waiting.clear()
        if not self._waiting and self._has_place():
            self._taken += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        if again:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        self._arm()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            else:  # the place was given a moment before
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._let_in()

    def refused(self) -> None:
        """Give a place back that the server did not have."""
        self._taken -= 1
        self._learnt = self._taken
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._arm()

    def admitted(self) -> None:
        """Note that the server had the place."""
        self._pause_s = FIRST_PAUSE_S
        if self._learnt is not None and self._taken > self._learnt:
            self._learnt = self._taken
            self._let_in()

    def _has_place(self) -> bool:
        return self._is_allowed() and (self._learnt is None or self._taken < self._learnt)

    def _is_allowed(self) -> bool:
        return self._most is None or self._taken < self._most

    def _let_in(self) -> None:
        while self._waiting and self._has_place():
            self._admit_first()
        self._arm()

    def _admit_first(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
                return

    def _arm(self) -> None:
        """See to it that somebody tries for more room, if what keeps those who wait is what was learnt."""
        if self._next_try is None and self._waiting and self._learnt is not None:
            self._next_try = asyncio.get_running_loop().call_later(self._pause_s, self._try)

    def _try(self) -> None:
        self._next_try = None
        if self._waiting and self._is_allowed():
            self._admit_first()
        self._arm()
