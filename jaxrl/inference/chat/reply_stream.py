"""A reply of a chat as its tokens come: what an OpenAI client can be told so far, and in the end the message that it was told.

In: sampled ids, piece by piece or all at once. Out: deltas that add up to one message. Calls of tools are told whole, when their end is
known; no text of theirs is ever told as content. What an OpenAI message has no place for (a call that is malformed, or that the client
does not take) is told as text, at the end. Told whole or in pieces, the message is the same, except where a model closes a thought that
it never opened, or begins a reply with thinking or calls only after some space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.inference.chat.wire import Message, reply_delta, reply_message
from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.types import ToolCall

_OPEN_TAG = re.compile(r"[<\[][^\s<\[]{0,24}$")
"""The end of a text that may yet become a tag, in a vocabulary that has no token for it."""
_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""
_PARSES = 128
"""A reply is taken apart again once it has grown by one part in so many: the work stays in proportion to its length."""

Parse = Callable[[np.ndarray], ParsedReply]


class ReplyTeller:
    """Tells one reply.

    Args:
      parse: takes sampled ids apart, without a final stop id.
      stop_ids: ids that end the reply, and are no part of what is told.
      stops: texts that end it.
      takes_calls: whether the client gave tools and lets them be called.
      is_parallel: whether it takes more than one call.
    """

    def __init__(
        self, parse: Parse, *, stop_ids: Sequence[int] = (), stops: Sequence[str] = (), takes_calls: bool = False, is_parallel: bool = True
    ) -> None:
        self._parse = parse
        self._stop_ids = frozenset(stop_ids)
        self._stops = tuple(stops)
        self._takes_calls = takes_calls
        self._is_parallel = is_parallel
        self._token_ids: list[int] = []
        self._num_parsed = 0
        self._content, self._reasoning = _Told(), _Told()
        self._calls: list[ToolCall] = []

    @property
    def num_calls(self) -> int:
        """How many calls were told."""
        return len(self._calls)

    @property
    def message(self) -> Message:
        """All that was told, as one message."""
        return reply_message(self._content.text, self._reasoning.text, self._calls)

    def add(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        is_stopped = len(token_ids) > 0 and token_ids[-1] in self._stop_ids
        self._token_ids += token_ids[:-1] if is_stopped else token_ids

    def delta(self) -> dict[str, Any]:
        """Return what has become certain; empty if nothing has."""
        num_tokens = len(self._token_ids)
        if num_tokens <= self._num_parsed + num_tokens // _PARSES:
            return {}
        self._num_parsed = num_tokens
        parsed = self._parse(np.asarray(self._token_ids, np.int32))
        calls, _ = self._sorted(parsed)
        content = "" if self._takes_calls and parsed.content.lstrip().startswith("{") else self._certain(parsed.content)
        return self._tell(content, self._certain(parsed.reasoning), calls)

    def end(self, stop: str | None = None) -> dict[str, Any]:
        """Return all that is left of a finished reply; `stop` is the text that ended it, if one did."""
        parsed = self._parse(np.asarray(self._token_ids, np.int32))
        calls, rest = self._sorted(parsed)
        content, reasoning = parsed.content, parsed.reasoning
        if rest:
            content = "\n".join(filter(None, (content, *map(_as_text, rest))))
        if stop is not None and stop in content:
            content = content[: content.rfind(stop)]
        elif stop is not None and stop in reasoning:
            reasoning = reasoning[: reasoning.rfind(stop)]
        return self._tell(content, reasoning, calls)

    def _tell(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        new = calls[len(self._calls) :]
        delta = reply_delta(self._content.tell(content), self._reasoning.tell(reasoning), new, len(self._calls))
        self._calls += new
        return delta

    def _sorted(self, parsed: ParsedReply) -> tuple[list[ToolCall], list[ToolCall]]:
        """Return the calls that the client is told as calls, and the others."""
        told: list[ToolCall] = []
        rest: list[ToolCall] = []
        for call in parsed.tool_calls:
            has_place = self._takes_calls and not call.error and (self._is_parallel or not told)
            (told if has_place else rest).append(call)
        return told, rest

    def _certain(self, text: str) -> str:
        """Return the beginning of a text that nothing which may still come can take back."""
        text = text.rstrip(_BROKEN)
        if (begun := _OPEN_TAG.search(text)) is not None:
            text = text[: begun.start()]
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min([*ends, len(text) - self._num_undecided(text)])].rstrip()

    def _num_undecided(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=0)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class _Told:
    """One text of a reply, told in pieces."""

    def __init__(self) -> None:
        self.text = ""
        self._known = ""

    def tell(self, text: str) -> str:
        """Return the next piece of a text that is `text` by now; what was told already is not told again."""
        known = next((told for told in (self._known, self._known.lstrip()) if text.startswith(told)), "")
        if len(text) < len(known) or self._known.startswith(text):
            return ""
        piece, self._known = text[len(known) :], text
        self.text += piece
        return piece


def _as_text(call: ToolCall) -> str:
    return call.raw if call.error else f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.raw}}}'
