"""JSON that a model wrote, read strictly: a value, the text that it was, or words about what is wrong and where.

What could not be passed on (a key that stands there twice, NaN, a number beyond floats, half a surrogate pair, brackets nested without
end) is refused like a missing brace. Whatever the text is, `JsonError` is all that is raised.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Brackets within brackets; far more than a tool's arguments need, far less than what ends a recursion."""

_SPACE = re.compile(r"[ \t\n\r]*")
_EXCERPT = 24
"""Characters of a text that an error repeats."""


class JsonError(ValueError):
    """A text is not the JSON that was expected; the message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Member:
    """The value of one key of an object."""

    value: Any
    raw: str
    """The text that it was read from."""


def skip_space(text: str, at: int) -> int:
    """Return the index of the first character at or after `at` that is no JSON whitespace."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def read_value(text: str, at: int = 0) -> tuple[Any, int]:
    """Read the JSON value that begins at `at`.

    Returns:
      The value, and the index after it.

    Raises:
      JsonError: there is none, or it is one that cannot be passed on.

    Example:
      >>> read_value('[1, 2.5] and more')
      ([1, 2.5], 8)
      >>> read_value('{"a": 1, "a": 2}')
      Traceback (most recent call last):
      jaxrl.inference.rendering.tool_calls.json_text.JsonError: the key 'a' stands there twice
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
        _check(value, 0)
    except json.JSONDecodeError as error:
        refuse(_worded(error.msg), text, error.pos)
    except RecursionError:
        raise JsonError(f"it is nested deeper than {MAX_DEPTH} brackets") from None
    return value, end


def read_object(text: str, at: int = 0) -> tuple[dict[str, Member], int]:
    """Read the JSON object that begins at `at`, keeping the text of each of its values.

    Returns:
      The members in their order, and the index after the object.

    Raises:
      JsonError: there is none, or it is one that cannot be passed on.

    Example:
      >>> read_object('{"a": [1,2]}')
      ({'a': Member(value=[1, 2], raw='[1,2]')}, 12)
    """
    _expect("{", text, at)
    members: dict[str, Member] = {}
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        if text[at : at + 1] != '"':
            refuse("expected a key in double quotes", text, at)
        key, at = read_value(text, at)
        if key in members:
            raise JsonError(f"the key {excerpt(key)} stands there twice")
        at = skip_space(text, at)
        _expect(":", text, at)
        begin = skip_space(text, at + 1)
        value, at = read_value(text, begin)
        members[key] = Member(value, text[begin:at])
        at = skip_space(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        if text[at : at + 1] != ",":
            refuse("expected ',' or '}'", text, at)
        at = skip_space(text, at + 1)


def refuse(what: str, text: str, at: int) -> NoReturn:
    """Raise a `JsonError` that says what came instead, and where."""
    raise JsonError(f"{what} after {at} characters, got {excerpt(text, at)}")


def excerpt(text: str, at: int = 0, *, length: int = _EXCERPT) -> str:
    """Return the beginning of `text[at:]` as an error repeats it."""
    rest = text[at:]
    if not rest:
        return "the end"
    return repr(rest if len(rest) <= length else rest[:length] + "...")


def _expect(character: str, text: str, at: int) -> None:
    if text[at : at + 1] != character:
        refuse(f"expected {character!r}", text, at)


def _worded(message: str) -> str:
    """Return a message of the json module as the first half of a sentence that goes on with the place."""
    return message[:1].lower() + message[1:].removesuffix(" at").removesuffix(" starting")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise JsonError(f"the key {excerpt(key)} stands there twice")
        members[key] = value
    return members


def _integer(digits: str) -> int:
    # Checked before it is converted: Python refuses some thousand digits, in words about itself.
    if len(digits) > 310 or math.isinf(float(digits)):
        raise JsonError(f"the number {digits[:_EXCERPT]}... is beyond what a float holds")
    return int(digits)


def _number(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise JsonError(f"the number {digits[:_EXCERPT]} is beyond what a float holds")
    return value


def _no_constant(word: str) -> NoReturn:
    raise JsonError(f"{word} is no JSON")


def _check(value: Any, depth: int) -> None:
    """Refuse brackets nested without end and strings that no encoding holds."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise JsonError("a text holds half of a surrogate pair")
    elif isinstance(value, dict | list):
        if depth >= MAX_DEPTH:
            raise JsonError(f"it is nested deeper than {MAX_DEPTH} brackets")
        for item in value if isinstance(value, list) else [*value, *value.values()]:
            _check(item, depth + 1)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number, parse_int=_integer, parse_constant=_no_constant)
