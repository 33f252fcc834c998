"""What an agent sends to the chat route and what it is told, in the shapes of OpenAI's API.

In: the bytes of a body. Out: an `Ask`, or a `Refusal` that names the field; and the bytes of a reply, whole or as the events of a
stream. How tokens are sampled is the environment's `sampling`, since they are trained on: what a body says of it is collected, for a
warning, and changes nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxrl.inference.chat.conversations import Heard, hear
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.chat.wire import ChatFieldError, Message, read_messages, read_tool_choice, read_tools, shown

MODEL = "policy"
"""What `/v1/models` calls the model; a body may call it anything."""

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "stop": ("", []),
    "seed": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "reasoning_effort": (),
}
"""Fields that would change how tokens are sampled, each with the values that ask for nothing; null always is one."""

_UNBUILT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
"""Fields that would change what a reply is and are not built, likewise."""


def retry_headers(status: int) -> dict[str, str]:
    """Return headers that tell a client whether to try again after a refusal: OpenAI's would repeat whatever a server failed at."""
    return {"x-should-retry": "true" if status == 429 else "false"}


def over() -> Refusal:
    """Return the refusal of a request whose rollout is over, or never was."""
    return Refusal(401, "this API key belongs to no rollout that goes on; a rollout ends when its agent returns", code="invalid_api_key")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for a reply."""

    messages: tuple[Message, ...]
    """The whole conversation, in the one spelling of `chat_wire`."""
    heard: Heard
    """The keys of its beginnings."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the policy is shown as its tools."""
    takes_calls: bool = False
    """Whether it may call them."""
    is_parallel: bool = True
    """Whether it may call more than one in a reply."""
    is_stream: bool = False
    """Whether the reply is told as events."""
    has_stream_usage: bool = False
    """Whether the last of them counts tokens."""
    model: str = MODEL
    """What the agent calls the policy."""
    unheeded: dict[str, Any] = field(default_factory=dict)
    """What it says of how tokens are to be sampled."""


@dataclass(frozen=True, slots=True)
class Told:
    """One reply, as the agent is told it."""

    message: Message
    """All of it."""
    delta: dict[str, Any]
    """All of it, as one event of a stream has it."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    num_prompt: int
    """Tokens of the prompt."""
    num_completion: int
    """Tokens of the reply."""


def read_ask(raw: bytes) -> Ask:
    """Return what a body asks for.

    Raises:
      Refusal: it is no JSON object, a field cannot be used, or it asks for what is not built.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, got {shown(body)}")
    for name in _asked_for(body, _UNBUILT):
        raise Refusal(400, f"`{name}`={shown(body[name])} is not supported here; leave it out", param=name)
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, f"`messages` must be a list of messages, not empty, got {shown(messages)}", param="messages")
    try:
        conversation = read_messages(messages)
        schemas = () if tools is None else read_tools(tools)
        may_call = read_tool_choice(body.get("tool_choice"))
    except ChatFieldError as error:
        raise Refusal(400, str(error), param=error.field.partition("[")[0]) from error
    options = _of_type(body, "stream_options", dict, {})
    return Ask(
        messages=conversation,
        heard=hear(conversation, schemas),
        tools=schemas,
        takes_calls=bool(schemas) and may_call,
        is_parallel=_of_type(body, "parallel_tool_calls", bool, True),
        is_stream=_of_type(body, "stream", bool, False),
        has_stream_usage=bool(options.get("include_usage")),
        model=_of_type(body, "model", str, MODEL),
        unheeded={name: body[name] for name in _asked_for(body, _SAMPLING)},
    )


def _of_type(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Refusal(400, f"`{name}` must be a {kind.__name__}, got {shown(value)}", param=name)
    return value


def _asked_for(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the fields of a body that ask for something."""
    return [name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values]


def whole_body(told: Told, head: Mapping[str, Any]) -> bytes:
    """Return the body of a reply; `head` is its `id`, `created` and `model`."""
    choice = {"index": 0, "message": told.message, "logprobs": None, "finish_reason": told.finish_reason}
    return msgspec.json.encode({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(told)})


def stream_body(told: Told, head: Mapping[str, Any], *, has_usage: bool) -> bytes:
    """Return the events of a reply: the role, what was said, why it ended, the tokens if they were asked for."""
    events = [_choice({"role": "assistant", "content": ""})]
    events += [_choice(told.delta)] if told.delta else []
    events.append(_choice({}, told.finish_reason))
    if has_usage:
        events.append({"choices": [], "usage": _usage(told)})
    lines = [b"data: " + msgspec.json.encode({**head, "object": "chat.completion.chunk", **event}) + b"\n\n" for event in events]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def models_body() -> bytes:
    """Return the body of `/v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl"}]})


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]}


def _usage(told: Told) -> dict[str, int]:
    total = told.num_prompt + told.num_completion
    return {"prompt_tokens": told.num_prompt, "completion_tokens": told.num_completion, "total_tokens": total}
