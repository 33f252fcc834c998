r"""Calls as Hermes and Qwen write them: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.inference.rendering.tool_calls.base import Found, broken_object, call_of_object, plain_call_id, safe_json
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, excerpt, read_object, skip_space
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """JSON objects between `<tool_call>` tags."""

    name = "hermes"
    tags: tuple[str, ...] = (_OPEN, _CLOSE)
    instruction = (
        "To call a tool, write a JSON object with its name and its arguments between tags, and nothing else between them:\n"
        '<tool_call>\n{"name": "the tool\'s name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "To call several tools, write several such blocks."
    )

    def find(self, reply: TaggedText, start: int) -> Found | None:
        """Return the first call that begins at or after `start`."""
        opened = reply.first({_OPEN}, start)
        if opened is None:
            return None
        written = reply.text[opened.end : reply.limit(opened.end)]
        try:
            members, at = read_object(written, skip_space(written, 0))
        except JsonError as error:
            return self._broken(reply, opened.begin, opened.end, error)
        after = opened.end + skip_space(written, at)
        closed = reply.first({_CLOSE}, after)
        if closed is None or closed.begin != after:
            what = f"expected {_CLOSE} after the JSON object, got {excerpt(reply.text, after)}"
            return self._broken(reply, opened.begin, opened.end, JsonError(what))
        return Found(opened.begin, closed.end, (call_of_object(members, written[:at].strip(), "arguments"),))

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return f'{_OPEN}\n{{"name": {safe_json(name)}, "arguments": {safe_json(arguments)}}}\n{_CLOSE}'

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call."""
        return plain_call_id(turn, index)

    def _broken(self, reply: TaggedText, begin: int, start: int, error: JsonError) -> Found:
        """Return a malformed call that ends where its tag is closed, before the next call, or with the reply."""
        nearest = reply.first({_OPEN, _CLOSE}, start)
        if nearest is None:
            end = after = len(reply.text)
        else:
            end = nearest.begin
            after = nearest.end if nearest.name == _CLOSE else nearest.begin
        call = broken_object(reply.text[start:end].strip(), error)
        return Found(begin, after, (call,))
