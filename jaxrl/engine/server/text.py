"""The text of a reply: whole, or as its tokens come.

In: token ids. Out: text without the stop string or stop id that ended it, and which one that was. `TextFollower` gives the same
text in pieces, holding back a broken character and whatever may yet become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from jaxrl.engine.requests import BROKEN
from jaxrl.inference.endpoint import FinishReason

DecodeText = Callable[[Sequence[int]], str]


class Ending(NamedTuple):
    """A finished reply as text."""

    text: str
    stop_reason: str | int | None
    """The stop string or the stop id that the request named; None if it ended by itself or was cut."""


def end_text(
    token_ids: Sequence[int],
    reason: FinishReason,
    *,
    stops: Sequence[str],
    stop_ids: Sequence[int],
    user_stop_ids: Set[int],
    decode: DecodeText,
) -> Ending:
    """Return the text of a finished reply.

    Args:
      token_ids: what was sampled, the tokens that hold the stop included.
      reason: why it ended.
      stops: the request's stop strings.
      stop_ids: every id that ends a reply.
      user_stop_ids: those that the request named.
      decode: token ids to text.

    Example:
      >>> decode = lambda ids: "".join("abcd"[i] for i in ids)
      >>> end_text([0, 1, 2, 3], FinishReason.STOP, stops=["cd"], stop_ids=(), user_stop_ids=set(), decode=decode)
      Ending(text='ab', stop_reason='cd')
    """
    text = decode(token_ids)
    if reason == FinishReason.STOP:
        at, stop = _first_stop(text, stops)
        if stop is not None:
            return Ending(text[:at], stop)
        if token_ids and token_ids[-1] in stop_ids:
            return Ending(decode(token_ids[:-1]), token_ids[-1] if token_ids[-1] in user_stop_ids else None)
    return Ending(text, None)


class TextFollower:
    """Turns one reply's tokens into pieces of text that add up to `end_text`."""

    def __init__(self, decode: DecodeText, stops: Sequence[str], stop_ids: Sequence[int]) -> None:
        """Start before the first token; the arguments are those of `end_text`."""
        self._decode = decode
        self._stops = stops
        self._stop_ids = frozenset(stop_ids)
        self._token_ids: list[int] = []
        self._begin = self._read = 0
        """The text up to `_read` is known; decoding starts at `_begin`, so that a piece keeps its leading space."""
        self._held = ""
        self._is_over = False

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that is certain after these tokens; with `is_last`, all that is left."""
        if self._is_over:
            return ""
        if token_ids and token_ids[-1] in self._stop_ids:
            token_ids, is_last = token_ids[:-1], True
        self._token_ids += token_ids
        known = self._decode(self._token_ids[self._begin : self._read])
        text = self._decode(self._token_ids[self._begin :])
        if is_last or not text.endswith(BROKEN):
            self._held += text[len(known) :]
            self._begin, self._read = self._read, len(self._token_ids)
        at, stop = _first_stop(self._held, self._stops)
        self._is_over = is_last or stop is not None
        certain = at if stop is not None else len(self._held) - (0 if is_last else _num_undecided(self._held, self._stops))
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Return where the first stop string of a text begins, and which one it is."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, key=lambda pair: pair[0], default=(-1, None))


def _num_undecided(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    longest = max(map(len, stops), default=0)
    return next((n for n in range(min(longest - 1, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
