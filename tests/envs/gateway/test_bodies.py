"""`jaxrl.envs.gateway.bodies`: what an agent sends, and the shapes in which it is told replies."""

import json
from typing import Any

import pytest

from jaxrl.envs.gateway.bodies import Told, read_ask, retry_headers, stream_body, whole_body
from jaxrl.inference.chat.refusals import Refusal

CHAT = [{"role": "user", "content": "q"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def read(**body: Any) -> Any:
    return read_ask(json.dumps({"messages": CHAT, **body}).encode())


def test_a_body_is_a_conversation_in_one_spelling_with_what_the_policy_may_do() -> None:
    plain = read()
    assert (plain.messages, plain.tools, plain.model) == (({"role": "user", "content": "q"},), (), "policy")
    assert (plain.takes_calls, plain.is_parallel, plain.is_stream, plain.has_stream_usage) == (False, True, False, False)
    options = {"stream": True, "stream_options": {"include_usage": True}, "parallel_tool_calls": False}
    full = read(tools=[TOOL], model="gpt", user="me", metadata={"a": "b"}, **options)
    assert (full.takes_calls, full.is_parallel, full.is_stream, full.has_stream_usage, full.model) == (True, False, True, True, "gpt")
    assert read(tools=[TOOL], tool_choice="none").takes_calls is False and read(tools=[TOOL], tool_choice="none").tools == (TOOL,)
    assert read(tools=[TOOL]).heard.keys != plain.heard.keys, "other tools make another conversation"


def test_what_asks_for_nothing_is_no_wish_about_sampling() -> None:
    nothing = {"temperature": None, "top_p": 1.0, "top_k": -1, "stop": [], "frequency_penalty": 0.0, "n": 1, "logprobs": False}
    assert read(**nothing, response_format={"type": "text"}).unheeded == {}
    assert read(temperature=0, seed=0, max_completion_tokens=5, stop="x").unheeded == {
        "temperature": 0, "max_completion_tokens": 5, "stop": "x", "seed": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), [
    ({"n": 2}, "n", "`n`=2 is not supported here"),
    ({"logprobs": True}, "logprobs", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"messages": []}, "messages", "must be a list of messages, not empty"),
    ({"messages": "q"}, "messages", "must be a list of messages"),
    ({"messages": [{"role": "user"}]}, "messages", "`messages[0]` needs a `role` and a `content`"),
    ({"tools": {}}, "tools", "must be a list of tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not supported"),
    ({"stream": "yes"}, "stream", "`stream` must be a bool, got 'yes'"),
    ({"stream_options": True}, "stream_options", "must be a dict"),
    ({"model": 3}, "model", "must be a str"),
])  # fmt: skip
def test_what_cannot_be_used_is_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(**body)
    error = json.loads(caught.value.body())["error"]
    assert words in error["message"] and (error["param"], error["type"], caught.value.status) == (param, "invalid_request_error", 400)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_ask(raw)
    assert caught.value.status == 400


def test_only_a_client_that_was_too_quick_is_told_to_try_again() -> None:
    again = {status: retry_headers(status)["x-should-retry"] for status in (400, 401, 409, 429, 500)}
    assert again == {400: "false", 401: "false", 409: "false", 429: "true", 500: "false"}


def test_a_reply_is_told_whole_or_as_events_that_say_the_same() -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": [call]}
    told = Told(message, {"content": "hi", "tool_calls": [{"index": 0, **call}]}, "tool_calls", num_prompt=5, num_completion=3)
    head = {"id": "chatcmpl-1", "created": 7, "model": "m"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert json.loads(whole_body(told, head)) == {
        **head, "object": "chat.completion", "usage": usage,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
    }  # fmt: skip
    *events, done, end = stream_body(told, head, has_usage=True).decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", "chatcmpl-1")}
    assert [choice["delta"] for chunk in chunks for choice in chunk["choices"]] == [{"role": "assistant", "content": ""}, told.delta, {}]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None, None, "tool_calls"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    assert len(stream_body(Told(message, {}, "stop", 1, 0), head, has_usage=False).split(b"\n\n")) == 4, "an empty reply has no delta"
