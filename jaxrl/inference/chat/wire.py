"""The shapes of OpenAI's chat API: what a client may send as messages and tools, and how a reply is told.

In: JSON values of a body, or a reply that was taken apart. Out: messages and tools as a renderer takes them, or the message and the
deltas that a client is told. Pure, and knows neither an engine nor HTTP: every part of jaxrl that an OpenAI client talks to words its
replies here, so that what comes back in the next request is what was told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.types import ToolCall

Message = dict[str, Any]
"""A message with the keys that a template may read, and no others: `role` and `content` (a text), and where they are, `name`,
`tool_calls`, `tool_call_id`, `reasoning_content`."""


class ChatFieldError(ValueError):
    """A field of a chat body that cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the field, as a path like `messages[2].content`, and say what was expected and what came."""
        super().__init__(f"`{field}`{problem}")
        self.field = field


# What a client sends


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Return checked messages in one spelling: content is a text, what is null is left out, and so is what no template reads.

    Args:
      messages: the list of a body; each with `role` and `content`, a text or a list of text parts. An assistant's content may be null,
        and it may have `tool_calls`; a tool's message has `tool_call_id`.

    Raises:
      ChatFieldError: one is malformed.

    Example:
      >>> read_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}])
      ({'role': 'user', 'content': 'hi'},)
    """
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return checked tools, each as it came: what stands in one is shown to the model.

    Raises:
      ChatFieldError: one is no function with a name of its own.
    """
    if not isinstance(tools, list):
        raise ChatFieldError("tools", f" must be a list of tools, got {shown(tools)}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ChatFieldError(
                where, f' must be `{{"type": "function", "function": {{...}}}}`, the only kind of tool here, got {shown(tool)}'
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise ChatFieldError(f"{where}.function", f" must be an object with a `name`, got {shown(function)}")
        for name, kind, word in (("description", str, "a text"), ("parameters", dict, "a JSON schema, an object,")):
            if not isinstance(function.get(name), kind | None):
                raise ChatFieldError(f"{where}.function.{name}", f" must be {word} or left out, got {shown(function[name])}")
        name = _text(function, "name", f"{where}.function")
        if name in names:
            raise ChatFieldError(f"{where}.function.name", f": two tools are called {name!r}; a call could mean either")
        names.add(name)
    return tuple(tools)


def read_tool_choice(choice: Any) -> bool:
    """Return whether a reply may call tools.

    Raises:
      ChatFieldError: it must call one, which nothing here can promise.
    """
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise ChatFieldError(
        "tool_choice",
        f"={shown(choice)} is not supported: what is sampled is not constrained, so that its logprobs are the model's own, and nobody can "
        "promise a call; use 'auto', ask for the call in words and look at `tool_calls`, or 'none'",
    )


def canonical_arguments(arguments: str) -> str:
    r"""Return the one spelling of a call's arguments, however a client wrote the same JSON object; a text that is none stays as it is.

    Example:
      >>> canonical_arguments('{ "b": 1.0, "a": "\\u00e9" }')
      '{"a":"é","b":1}'
    """
    try:
        value = json.loads(arguments or "{}", parse_float=_number)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def shown(value: Any) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ChatFieldError(where, f" must be an object, got {shown(message)}")
    role, content = message.get("role"), message.get("content")
    is_assistant = role == "assistant"
    text = "" if content is None and is_assistant else _content(content)
    if not isinstance(role, str) or not role or text is None:
        raise ChatFieldError(
            where, f" needs a `role` and a `content` of text or of text parts, got role={role!r:.100} and content={shown(content)}"
        )
    told: Message = {"role": role, "content": text}
    for name in ("name", "reasoning_content"):
        if message.get(name) is not None:
            told[name] = _text(message, name, where)
    for name in ("function_call", "audio", "refusal"):
        if message.get(name):
            hint = "; use `tool_calls`" if name == "function_call" else ""
            raise ChatFieldError(f"{where}.{name}", f" is not supported{hint}, got {shown(message[name])}")
    if calls := message.get("tool_calls"):
        if not is_assistant:
            raise ChatFieldError(f"{where}.tool_calls", f": only an assistant calls tools, the role is {role!r:.100}")
        if not isinstance(calls, list):
            raise ChatFieldError(f"{where}.tool_calls", f" must be a list of calls, got {shown(calls)}")
        told["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "tool":
        told["tool_call_id"] = _text(message, "tool_call_id", where)
    return told


def _content(content: Any) -> str | None:
    """Return a message's text; None if it is none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    return "".join(texts) if len(texts) == len(content) > 0 and all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ChatFieldError(where, f' must be `{{"id", "type": "function", "function": {{"name", "arguments"}}}}`, got {shown(call)}')
    arguments = function.get("arguments")
    try:
        is_object = isinstance(arguments, str) and isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ChatFieldError(f"{where}.function.arguments", f" must be the JSON text of an object, got {shown(arguments)}")
    name = _text(function, "name", f"{where}.function")
    return {"id": _text(call, "id", where), "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not value:
        raise ChatFieldError(f"{where}.{name}", f" must be a text that is not empty, got {shown(value)}")
    return value


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


# What a client is told


def call_shape(call: ToolCall) -> dict[str, Any]:
    """Return a well-formed call as a message has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}


def reply_message(content: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    """Return the message of a reply; `content` is null if there are calls and no text beside them."""
    message: Message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call_shape(call) for call in calls]
    return message


def reply_delta(content: str, reasoning: str, calls: Sequence[ToolCall], num_before: int) -> dict[str, Any]:
    """Return what a stream tells next; a call comes whole. `num_before` calls were told already."""
    delta: dict[str, Any] = {}
    if reasoning:
        delta["reasoning_content"] = reasoning
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = [{"index": num_before + index, **call_shape(call)} for index, call in enumerate(calls)]
    return delta


def finish_word(word: str, num_calls: int) -> str:
    """Return OpenAI's `finish_reason`: a reply that stopped and calls tools says so; one that was cut does not.

    Example:
      >>> finish_word("stop", 2), finish_word("stop", 0), finish_word("length", 2)
      ('tool_calls', 'stop', 'length')
    """
    return "tool_calls" if word == "stop" and num_calls else word
