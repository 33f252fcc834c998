"""What a format of tool calls is: how a model writes that it wants a tool to run.

A format finds calls in the text of a reply and writes them. It knows neither ids nor thinking, and never raises over what a model wrote:
what was meant as a call and cannot be read is a `WrittenCall` with an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.inference.rendering.tool_calls.json_text import JsonError, Member, excerpt
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText

_TAG_LIKE = re.compile(r"<(?=[|\uff5c/!]|[A-Za-z_]+[>=])|\[(?=/?[A-Z_]+\])")
"""Where a text begins that some tokenizer may take for one of its special tokens."""
_CALL_ID = re.compile(r"call_([0-9]{1,9})_[0-9]+|([0-9a-z]{4})[0-9a-z]{5}")


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call as it was written, or what was meant as one."""

    name: str
    """The tool; empty if not even that could be read."""
    arguments: dict[str, Any] | None
    """None if the call is malformed."""
    raw: str
    """The JSON text of the arguments; for a malformed call, whatever stood in its place."""
    error: str = ""
    """Why it is malformed; empty if it is not."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stretch of a reply that is calls and nothing else."""

    begin: int
    """Index of its first character."""
    end: int
    """Index after its last character."""
    calls: tuple[WrittenCall, ...]
    """In the order in which they stand there."""


class CallFormat(Protocol):
    """One way to write calls of tools."""

    name: str
    """As in `model.tool_format`."""
    tags: tuple[str, ...]
    """What marks a call, in a text that holds one."""
    instruction: str
    """How to call a tool, in words for the policy."""

    def find(self, reply: TaggedText, start: int) -> Found | None:
        """Return the first calls that begin at or after `start`, up to where they end; None if there is none."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call; several are written one after another."""
        ...

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call, unique in its conversation."""
        ...


def plain_call_id(turn: int, index: int) -> str:
    """Return the id of call number `index` of a turn, for formats that take any.

    Example:
      >>> plain_call_id(2, 0)
      'call_2_0'
    """
    return f"call_{turn}_{index}"


def turn_of(call_id: str) -> int | None:
    """Return the turn that the id of a call stands for, in whichever format; None for an id that somebody else made.

    Example:
      >>> turn_of("call_2_0"), turn_of("000200011"), turn_of("toolu_7")
      (2, 2, None)
    """
    match = _CALL_ID.fullmatch(call_id)
    return None if match is None else int(match[1]) if match[1] else int(match[2], 36)


def safe_json(value: Any) -> str:
    r"""Return a value as a JSON text in which nothing reads like a special token, whatever the strings in it hold.

    Raises:
      ValueError: it is no JSON.

    Example:
      >>> safe_json({"a": "x < y", "b": "</tool_call>"})
      '{"a": "x < y", "b": "\\u003c/tool_call>"}'
    """
    # These characters stand nowhere but in strings, where an escape is as good.
    return _TAG_LIKE.sub(_escaped, json.dumps(value, ensure_ascii=False, allow_nan=False))


def reads_like_a_tag(text: str) -> bool:
    """Say whether some tokenizer may take a part of a text for a special token."""
    return _TAG_LIKE.search(text) is not None


def call_of_object(members: Mapping[str, Member], written: str, arguments_key: str) -> WrittenCall:
    """Return the call that a JSON object is.

    Args:
      members: the object.
      written: its text.
      arguments_key: the key that holds the arguments; the tool stands under `name`.
    """
    name = members["name"].value if "name" in members else None
    if not isinstance(name, str) or not name:
        came = excerpt(members["name"].raw) if "name" in members else f"the keys {excerpt(', '.join(members))}" if members else "no key"
        return WrittenCall("", None, written, f"expected the tool's name, a text, under `name`, got {came}")
    if arguments_key not in members:
        others = ", ".join(key for key in members if key != "name")
        came = f"the keys {excerpt(others)}" if others else "no other key"
        return WrittenCall(name, None, written, f"expected a JSON object under `{arguments_key}`, got {came} beside `name`")
    arguments = members[arguments_key]
    if not isinstance(arguments.value, dict):
        return WrittenCall(name, None, arguments.raw, f"expected a JSON object under `{arguments_key}`, got {excerpt(arguments.raw)}")
    return WrittenCall(name, arguments.value, arguments.raw)


_NAME = re.compile(r'"name"\s*:\s*"([^"\\\x00-\x1f]{1,64})"')


def broken_object(written: str, error: JsonError) -> WrittenCall:
    """Return the malformed call that a text is which should have been a JSON object; its name, if that much can be read."""
    match = _NAME.search(written)
    return WrittenCall(match.group(1) if match else "", None, written, f"the call cannot be read: {error}")


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"
