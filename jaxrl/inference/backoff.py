"""How long to wait before a request is sent again, and which failures are worth it. Pure rules; nothing here waits.

Sending again is safe because an answer that was lost was seen by nobody. A score is a function of its tokens. A
generation carries its seed, so the second try draws the same reply; with a fresh seed, the replies that survive a flaky
connection would be the short ones. Neither leaves anything behind on the server but the work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

BUSY_STATUSES = (429, 502, 503, 504)
"""Answers that say "not now"; every other one is final."""
LOST_CONNECTIONS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""No answer, or one cut short. A server also drops idle connections, each time that it answers 500 for one, and the next
request then meets a closed connection."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential waits with jitter, so that many waiting clients do not come back all at once."""

    first_s: float = 0.5
    """The wait before the second try is half of this to all of it; each further one is of twice as much."""
    longest_s: float = 20.0
    """No wait is longer, but for one that the server itself asks for."""
    draw: Callable[[], float] = random.random
    """Gives numbers in [0, 1)."""

    def wait_s(self, num_tries: int, retry_after_s: float | None) -> float:
        """Return the seconds to wait after `num_tries >= 1` tries.

        Args:
          num_tries: tries so far.
          retry_after_s: what the server asked for, which is the least; None if it did not.

        Example:
          >>> rule = Backoff(first_s=1.0, longest_s=5.0, draw=lambda: 0.5)
          >>> [rule.wait_s(n, None) for n in (1, 2, 3, 4)], rule.wait_s(1, 30.0)
          ([0.75, 1.5, 3.0, 3.75], 30.0)
        """
        wait_s = min(self.longest_s, self.first_s * 2 ** (num_tries - 1)) * (0.5 + 0.5 * self.draw())
        return max(wait_s, retry_after_s or 0.0)


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, given in seconds or as a date; None if it is absent or unreadable.

    Example:
      >>> retry_after_s("2.5"), retry_after_s("soon"), retry_after_s(None)
      (2.5, None, None)
      >>> retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT", datetime(2015, 10, 21, 7, 27, 50, tzinfo=UTC))
      10.0
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            until = parsedate_to_datetime(header)
        except ValueError:
            return None
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        seconds = (until - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if seconds == seconds and seconds != float("inf") else None
