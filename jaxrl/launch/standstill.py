"""Says where the event loop stands when it no longer ticks: a call that blocks there holds up every rollout without a word.

In: a running loop, watched from a thread of its own. Out: one warning. It ends nothing and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
from types import FrameType

logger = logging.getLogger(__name__)

STANDSTILL_S = 30.0
"""How long the loop may stand still before it is said."""
_NUM_LOOKS = 10
"""How often it is looked at in that time."""
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")


class StandstillWatch:
    """Watches the running loop while the block runs; it warns at most once.

    Args:
      limit_s: how long the loop may stand still, in seconds.
    """

    def __init__(self, limit_s: float = STANDSTILL_S) -> None:
        self._limit_s = limit_s
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        """Begin, in the thread of the loop."""
        call = (asyncio.get_running_loop(), threading.get_ident())
        self._thread = threading.Thread(target=self._watch, args=call, name="standstill watch", daemon=True)
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        """End; the loop is not touched any more afterwards."""
        self._is_over.set()
        self._thread.join()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        ticked = threading.Event()
        ticked.set()
        num_silent = 0
        # Looks are counted, not seconds: where the whole process was asleep, nobody looked, and the loop is not to blame.
        while not self._is_over.wait(self._limit_s / _NUM_LOOKS):
            if ticked.is_set():
                num_silent = 0
                ticked.clear()
                loop.call_soon_threadsafe(ticked.set)
                continue
            num_silent += 1
            if num_silent == _NUM_LOOKS:
                place = where_it_stands(sys._current_frames()[thread_id])
                logger.warning(
                    "the event loop has stood still for %g s, and every rollout with it: it is in %s. An `async def` of an agent or an "
                    "environment must not block: use an async client there, or a plain `def`, which runs in a thread of its own. "
                    "Ctrl-C twice ends the process",
                    self._limit_s, place,
                )  # fmt: skip
                return


def where_it_stands(frame: FrameType) -> str:
    """Return where a thread is in a user's own words: the innermost call that is not of the standard library or an installed package.

    Args:
      frame: the thread's innermost frame.
    """
    frames: list[FrameType] = []
    current: FrameType | None = frame
    while current is not None:
        frames.append(current)
        current = current.f_back
    foreign = [f for f in frames if not _is_standard(f)]
    own = [f for f in foreign if not any(part in f.f_code.co_filename for part in _INSTALLED)]
    shown = (own or foreign or frames)[0]
    return _place(shown) if shown is frame else f"{_place(shown)} (down in {_place(frame)})"


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith("<frozen") or (path.startswith(_STDLIB) and not any(part in path for part in _INSTALLED))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, `{frame.f_code.co_qualname}`"
