"""Chat messages and tools in the one shape that chat templates are given.

In: messages and tool schemas as OpenAI's API has them. Out: copies with one string as content and JSON objects as arguments. It renders
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.errors import EnvError
from jaxrl.inference.rendering.replies import ParsedReply

Messages = tuple[dict[str, Any], ...]
Tools = tuple[dict[str, Any], ...]

_SURROGATES = re.compile("[\ud800-\udfff]")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return copies of messages: content is one string, arguments of calls are objects where they can be, nothing is null.

    Raises:
      EnvError: no message, or one without role or text; an assistant's may be without text if it calls tools.
    """
    if not messages:
        raise EnvError("`ask` got no message; pass at least one")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise EnvError(f"messages must be a list of them, got {messages!r:.200}; a single one goes into a list, too")
    return tuple(_plain_message(message) for message in messages)


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return copies of tool schemas.

    Raises:
      EnvError: they are no JSON objects.
    """
    copies = _as_json(list(tools), "the schemas of tools")
    if not all(isinstance(tool, dict) for tool in copies):
        raise EnvError(f"the schema of a tool must be a JSON object, got {tools!r}")
    return tuple(copies)


def told_apart(messages: Messages, replies: Mapping[int, ParsedReply]) -> Messages:
    """Return a conversation in which replies are taken apart: text, thinking and calls of tools each in their own field."""
    return tuple(_reply_message(replies[index]) if index in replies else message for index, message in enumerate(messages))


def with_arguments_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the arguments of calls are JSON texts, for templates that write them as they are."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def whole_characters(text: str) -> str:
    """Return a text in which halves of characters, which no tokenizer takes, are U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _reply_message(reply: ParsedReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.raw if call.arguments is None else call.arguments},
            }
            for call in reply.tool_calls
        ]
    return message


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise EnvError(f"a message must be an object with a `role` and a `content`, got {message!r:.200}")
    role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls") or ()
    if isinstance(content, list | tuple):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) > 0 else None
    elif content is None and calls and role == "assistant":
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise EnvError(
            f"a message needs a `role` and a `content` of text or of text parts, got role={role!r} and content={message.get('content')!r}"
        )
    plain = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    plain["content"] = whole_characters(content)
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name, arguments = (function.get("name"), function.get("arguments", {})) if isinstance(function, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, str | Mapping):
        raise EnvError(
            'a call of a tool needs the shape {"id", "type": "function", "function": {"name", "arguments"}} with the arguments as a JSON '
            f"text or object, got {call!r}"
        )
    arguments = _parsed(arguments) if isinstance(arguments, str) else _as_json(dict(arguments), f"the arguments of {name!r}")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _parsed(text: str) -> dict[str, Any] | str:
    """Return the object that a JSON text stands for, or the text if it stands for none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _as_json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"{what} must be JSON: {error}") from error
