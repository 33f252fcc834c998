"""Calls as Mistral writes them: `[TOOL_CALLS]` before a JSON list of calls, or before a name, `[ARGS]` and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.inference.rendering.tool_calls.base import Found, WrittenCall, broken_object, call_of_object, safe_json
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, excerpt, read_object, refuse, skip_space
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText

_OPEN, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Mistral:
    """A list of JSON objects after `[TOOL_CALLS]`, or `[TOOL_CALLS]name[ARGS]{...}`, as different releases have it."""

    name = "mistral"
    tags: tuple[str, ...] = (_OPEN, _ARGS, _CALL_ID)
    instruction = (
        "To call tools, write a tag and a JSON list of the calls after it, each with a name and arguments:\n"
        '[TOOL_CALLS][{"name": "the tool\'s name", "arguments": {"argument": "value"}}]'
    )

    def find(self, reply: TaggedText, start: int) -> Found | None:
        """Return the calls after the first `[TOOL_CALLS]` that begins at or after `start`."""
        opened = reply.first({_OPEN}, start)
        if opened is None:
            return None
        begin = skip_space(reply.text, opened.end)
        if reply.text[begin : begin + 1] == "[" and reply.first(self.tags, begin, begin + 1) is None:
            calls, end = self._read_list(reply, begin)
        else:
            calls, end = self._read_named(reply, opened.end)
        return Found(opened.begin, end, calls)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return f'{_OPEN}[{{"name": {safe_json(name)}, "arguments": {safe_json(arguments)}}}]'

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call: these chat templates take nine letters and digits, and nothing else.

        Example:
          >>> Mistral().call_id(2, 37)
          '000200011'
        """
        return _base_36(turn, 4) + _base_36(index, 5)

    def _read_list(self, reply: TaggedText, begin: int) -> tuple[tuple[WrittenCall, ...], int]:
        written = reply.text[begin : reply.limit(begin + 1)]
        calls: list[WrittenCall] = []
        at = skip_space(written, 1)
        try:
            while written[at : at + 1] != "]":
                members, end = read_object(written, at)
                call = call_of_object(members, written[at:end], "arguments")
                end = skip_space(written, end)
                if written[end : end + 1] not in (",", "]"):
                    refuse("expected ',' or ']'", written, end)
                calls.append(call)
                at = skip_space(written, end + 1) if written[end] == "," else end
            if not calls:
                raise JsonError("expected a list of calls, got an empty one")
        except JsonError as error:
            end = self._next(reply, begin)
            return (*calls, broken_object(reply.text[begin + at : end].strip(), error)), end
        return tuple(calls), begin + at + 1

    def _read_named(self, reply: TaggedText, start: int) -> tuple[tuple[WrittenCall, ...], int]:
        end = self._next(reply, start)
        args = reply.first({_ARGS}, start, end)
        if args is None:
            what = f"expected a JSON list, or a tool's name and {_ARGS}, after {_OPEN}, got {excerpt(reply.text[:end], start)}"
            return (WrittenCall("", None, reply.text[start:end].strip(), what),), end
        named = reply.first({_CALL_ID}, start, args.begin) or args
        name = reply.text[start : named.begin].strip()
        written = reply.text[args.end : reply.limit(args.end)]
        try:
            members, at = read_object(written, skip_space(written, 0))
        except JsonError as error:
            raw = reply.text[args.end : end].strip()
            return (WrittenCall(name, None, raw, f"the arguments cannot be read: {error}"),), end
        raw = written[:at].strip()
        if not name:
            return (WrittenCall("", None, raw, f"expected the tool's name between {_OPEN} and {_ARGS}, got nothing"),), args.end + at
        return (WrittenCall(name, {key: member.value for key, member in members.items()}, raw),), args.end + at

    def _next(self, reply: TaggedText, start: int) -> int:
        """Return where the next call begins, or the reply ends."""
        following = reply.first({_OPEN}, start)
        return following.begin if following else len(reply.text)


def _base_36(number: int, width: int) -> str:
    digits = ""
    for _ in range(width):
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits
