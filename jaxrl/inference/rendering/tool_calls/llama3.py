"""Calls as Llama 3 writes them: the reply is JSON objects with `name` and `parameters`, after `<|python_tag|>` or alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxrl.inference.rendering.tool_calls.base import Found, WrittenCall, broken_object, call_of_object, plain_call_id, safe_json
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, read_object, skip_space
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText

_TAG = "<|python_tag|>"
_BEGINS_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|parameters|type)"\s*:')
_NAMES_PARAMETERS = re.compile(r'"parameters"\s*:')


class Llama3:
    """JSON objects that are the whole reply, with `;` or space between them.

    An answer that is a JSON object is no call: without the tag, a call has a `name` and `parameters`, or breaks off where it shows both.
    """

    name = "llama3"
    tags: tuple[str, ...] = (_TAG,)
    instruction = (
        "To call a tool, reply with nothing but a JSON object of its name and its arguments:\n"
        '{"name": "the tool\'s name", "parameters": {"argument": "value"}}\n'
        "To call several tools, write several such objects with ; between them."
    )

    def find(self, reply: TaggedText, start: int) -> Found | None:
        """Return the calls that the reply is from `start` on, or from the tag on."""
        tag = reply.first({_TAG}, start)
        if tag is not None:
            calls, end = self._read(reply.text, tag.end)
            return Found(tag.begin, end, calls)
        begin = skip_space(reply.text, start)
        if reply.text[start:begin].strip() or reply.text[begin : begin + 1] != "{":
            return None
        calls, end = self._read(reply.text, begin)
        return Found(begin, end, calls) if self._is_meant(reply.text[begin:], calls) else None

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return f'{{"name": {safe_json(name)}, "parameters": {safe_json(arguments)}}}'

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call."""
        return plain_call_id(turn, index)

    def _read(self, text: str, start: int) -> tuple[tuple[WrittenCall, ...], int]:
        """Return the objects from `start` on and the index after them; what cannot be read lasts until the end."""
        calls: list[WrittenCall] = []
        at = skip_space(text, start)
        while not calls or text[at : at + 1] == "{":
            written = text[at:]
            try:
                members, length = read_object(written)
            except JsonError as error:
                return (*calls, broken_object(written.strip(), error)), len(text)
            calls.append(call_of_object(members, written[:length], "parameters"))
            at = skip_space(text, at + length)
            if text[at : at + 1] == ";":
                at = skip_space(text, at + 1)
        return tuple(calls), at

    def _is_meant(self, written: str, calls: tuple[WrittenCall, ...]) -> bool:
        if calls[0].arguments is not None:
            return True
        return bool(_BEGINS_LIKE_A_CALL.match(written) and _NAMES_PARAMETERS.search(written))
