"""Takes a reply apart: thinking, calls of tools in one format, and the text around them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.inference.rendering.tool_calls.base import CallFormat, Found, WrittenCall
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText, Tagger
from jaxrl.types import ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

THINK, END_THINK = "<think>", "</think>"

_CALL_LIKE = re.compile(
    r"</?tool_?calls?>|</?function_?calls?>|<function=|<\|python_tag\|>|<\|/?tool_?calls?|\[/?TOOL_CALLS\]|<[|\uff5c]tool\u2581calls?"
    r'|"name"\s*:\s*"[^"]{1,64}"\s*,\s*"(?:arguments|parameters)"\s*:'
)
"""What a call looks like, in any format that is known to be in use."""


def reads_like_a_call(text: str) -> bool:
    """Say whether there is something in a text that a call in some format looks like."""
    return _CALL_LIKE.search(text) is not None


class CallParser:
    """Reads the replies of one model. Only sampled ids are read, so what a user quotes is nobody's call.

    Args:
      tokenizer: the policy's.
      call_format: how the policy writes calls.
      thinks_at_once: whether the generation prompt opens the thinking, so that a reply begins inside of it.
      why: how the format was chosen, for logs.
      is_proven: whether it was seen to read what the chat template writes.
    """

    def __init__(
        self, tokenizer: Tokenizer, call_format: CallFormat, *, thinks_at_once: bool = False, why: str = "", is_proven: bool = False
    ) -> None:
        self.format = call_format
        self.is_proven = is_proven
        self.thinks_at_once = thinks_at_once
        self.why = why
        self.how = f"calls of tools are read as {call_format.name!r}" + (f": {why}" if why else "")
        self._tagger = Tagger(tokenizer, (*call_format.tags, THINK, END_THINK))

    def parse(self, token_ids: np.ndarray, *, turn: int) -> ParsedReply:
        """Take a reply apart; nothing that a model writes makes it raise."""
        reply = self._tagger.tag(token_ids)
        said: list[str] = []
        thought: list[str] = []
        calls: list[WrittenCall] = []
        found: Found | None = None
        at = self._think(reply, 0, thought) if self._begins_inside(reply) else 0
        while at < len(reply.text):
            opened = reply.first({THINK}, at)
            if found is None or found.begin < at:
                found = self.format.find(reply, at)
            if opened and (found is None or opened.begin < found.begin):
                said.append(reply.text[at : opened.begin])
                at = self._think(reply, opened.end, thought)
            elif found:
                said.append(reply.text[at : found.begin])
                calls.extend(found.calls)
                at = found.end
            else:
                said.append(reply.text[at:])
                break
        is_whole = not thought and not calls
        content = "".join(said) if is_whole else "".join(said).strip()
        return ParsedReply(
            content=content,
            reasoning="\n".join(filter(None, thought)),
            tool_calls=tuple(self._numbered(call, turn, index) for index, call in enumerate(calls)),
            has_unread_call=not calls and reads_like_a_call(content or "\n".join(thought)),
        )

    def _begins_inside(self, reply: TaggedText) -> bool:
        """Say whether the reply begins as thinking without a tag that opens it."""
        first = reply.first({THINK, END_THINK}, 0)
        if first and first.name == THINK:
            return self.thinks_at_once and bool(reply.text[: first.begin].strip())
        if self.thinks_at_once or first is None:
            return self.thinks_at_once
        called = self.format.find(reply, 0)
        return called is None or first.begin < called.begin

    def _think(self, reply: TaggedText, start: int, thought: list[str]) -> int:
        """Keep the thinking that stands at `start`, up to its end or the reply's; return where the reply goes on."""
        closed = reply.first({END_THINK}, start)
        thought.append(reply.text[start : closed.begin if closed else len(reply.text)].strip())
        return closed.end if closed else len(reply.text)

    def _numbered(self, call: WrittenCall, turn: int, index: int) -> ToolCall:
        return ToolCall(self.format.call_id(turn, index), call.name, call.arguments, call.raw, call.error)
