r"""Calls as Qwen3-Coder writes them: `<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.inference.rendering.tool_calls.base import Found, WrittenCall, plain_call_id, reads_like_a_tag, safe_json
from jaxrl.inference.rendering.tool_calls.json_text import JsonError, excerpt, read_value, refuse
from jaxrl.inference.rendering.tool_calls.tagged import TaggedText

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_END = re.compile(r"</function>\s*")
_WORDS = {"True": True, "False": False, "None": None}
"""How chat templates write these values, which JSON spells differently."""


class Xml:
    """Parameters as elements. A value that is JSON is that value, any other is a text."""

    name = "xml"
    tags: tuple[str, ...] = (_OPEN, _CLOSE)
    instruction = (
        "To call a tool, write its name and each of its arguments in this form:\n"
        "<tool_call>\n<function=the tool's name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>\n"
        "To call several tools, write several such blocks."
    )

    def find(self, reply: TaggedText, start: int) -> Found | None:
        """Return the first call that begins at or after `start`."""
        opened = reply.first({_OPEN}, start)
        if opened is None:
            return None
        nearest = reply.first({_OPEN, _CLOSE}, opened.end)
        end = nearest.begin if nearest else len(reply.text)
        written = reply.text[opened.end : end]
        call = self._read(written)
        if nearest is None or nearest.name != _CLOSE:
            if not call.error:
                call = WrittenCall(call.name, None, written.strip(), f"expected {_CLOSE} after </function>, got {excerpt(reply.text, end)}")
            return Found(opened.begin, end, (call,))
        return Found(opened.begin, nearest.end, (call,))

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call.

        Raises:
          ValueError: a name or a value cannot be written in this form.
        """
        if odd := [word for word in (name, *arguments) if not word or word != word.strip() or set(word) & set("<>\n")]:
            raise ValueError(f"the {self.name} format has no way to write the name {odd[0]!r}")
        parameters = "".join(f"<parameter={key}>\n{_written(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"{_OPEN}\n<function={name}>\n{parameters}</function>\n{_CLOSE}"

    def call_id(self, turn: int, index: int) -> str:
        """Return the id of a call."""
        return plain_call_id(turn, index)

    def _read(self, written: str) -> WrittenCall:
        name, arguments = "", {}
        try:
            function = _FUNCTION.match(written)
            if function is None:
                refuse("expected <function=the tool's name>", written, 0)
            name, at = function.group(1).strip(), function.end()
            while parameter := _PARAMETER.match(written, at):
                key = parameter.group(1).strip()
                if key in arguments:
                    raise JsonError(f"the parameter {excerpt(key)} stands there twice")
                arguments[key] = _value(parameter.group(2))
                at = parameter.end()
            ending = _END.match(written, at)
            if ending is None:
                refuse("expected <parameter=...> with its </parameter>, or </function>", written, at)
            if ending.end() < len(written):
                refuse("expected nothing after </function>", written, ending.end())
        except JsonError as error:
            return WrittenCall(name, None, written.strip(), f"the call cannot be read: {error}")
        return WrittenCall(name, arguments, json.dumps(arguments, ensure_ascii=False))


def _value(text: str) -> Any:
    """Return what a parameter's text stands for."""
    stripped = text.strip()
    if stripped in _WORDS:
        return _WORDS[stripped]
    try:
        value, end = read_value(stripped)
    except JsonError:
        return text
    return value if end == len(stripped) else text


def _written(value: Any) -> str:
    """Return the text of a value: strings stand as they are wherever they would be read back as themselves."""
    if isinstance(value, str) and _value(value) == value and not reads_like_a_tag(value):
        return value
    return safe_json(value)
