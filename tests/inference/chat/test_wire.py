"""The shapes of OpenAI's chat API: what is read, what is refused by name, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.inference.chat.wire import (
    ChatFieldError,
    canonical_arguments,
    finish_word,
    read_messages,
    read_tool_choice,
    read_tools,
    reply_delta,
    reply_message,
)
from jaxrl.types import ToolCall

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}}
ADD = ToolCall("call_0", "add", {"a": 3}, '{"a": 3}')


def called(**changes: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}]


def test_messages_come_in_one_spelling_without_what_no_template_reads() -> None:
    sent = [
        {"role": "system", "content": "Add.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "3 "}, {"text": "+ 4"}], "name": "ann", "cache_control": {"type": "x"}},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "reasoning_content": "easy", "tool_calls": [{**CALL, "index": 0, "function": {"name": "add", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": ""},
        {"role": "assistant", "tool_calls": []},
    ]  # fmt: skip
    assert read_messages(sent) == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "3 + 4", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "easy", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "name": "add", "tool_call_id": "c"},
        {"role": "assistant", "content": ""},
    )
    assert sent[1]["content"][0] == {"type": "text", "text": "3 "}  # nothing of the caller's was changed


@pytest.mark.parametrize(
    ("messages", "field", "problem"),
    [
        (["hi"], "messages[0]", "must be an object, got 'hi'"),
        ([{"content": "x"}], "messages[0]", "needs a `role`"),
        ([{"role": "user", "content": None}], "messages[0]", "content=None"),
        ([{"role": "user", "content": []}], "messages[0]", r"content=\[\]"),
        ([{"role": "tool", "content": None, "tool_call_id": "c"}], "messages[0]", "content=None"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0]", "image_url"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "7"}], "messages[1].tool_call_id", "not empty, got None"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name", "got 3"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls", "the role is 'user'"),
        ([{"role": "assistant", "content": "x", "tool_calls": CALL}], "messages[0].tool_calls", "a list of calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "use `tool_calls`"),
        (called(id=""), "messages[0].tool_calls[0].id", "got ''"),
        (called(type="custom"), "messages[0].tool_calls[0]", "custom"),
        (called(function={"arguments": "{}"}), "messages[0].tool_calls[0].function.name", "got None"),
        (called(function={"name": "f", "arguments": {}}), "messages[0].tool_calls[0].function.arguments", "JSON text of an object"),
        (called(function={"name": "f", "arguments": "{"}), "messages[0].tool_calls[0].function.arguments", "got '{'"),
        (called(function={"name": "f", "arguments": "[" * 9000}), "messages[0].tool_calls[0].function.arguments", "JSON text"),
    ],
)
def test_a_malformed_message_is_refused_by_the_name_of_its_field(messages: list[Any], field: str, problem: str) -> None:
    with pytest.raises(ChatFieldError, match=problem) as caught:
        read_messages(messages)
    assert caught.value.field == field and len(str(caught.value)) < 400


def test_tools_come_as_they_are_whatever_else_stands_in_them() -> None:
    bare = {"type": "function", "function": {"name": "now", "parameters": None, "x_vendor": [1]}, "cache_control": {}}
    assert read_tools([TOOL, bare]) == (TOOL, bare)


@pytest.mark.parametrize(
    ("tools", "field", "problem"),
    [
        ({}, "tools", "a list of tools"),
        (["add"], "tools[0]", "the only kind of tool here, got 'add'"),
        ([TOOL, {"type": "web_search"}], "tools[1]", "web_search"),
        ([{"type": "function"}], "tools[0].function", "an object with a `name`"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "not empty"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "tools[0].function.parameters", "a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "description": 1}}], "tools[0].function.description", "a text or left out, got 1"),
        ([TOOL, TOOL], "tools[1].function.name", "two tools are called 'add'"),
    ],
)
def test_a_malformed_tool_is_refused_by_the_name_of_its_field(tools: Any, field: str, problem: str) -> None:
    with pytest.raises(ChatFieldError, match=problem) as caught:
        read_tools(tools)
    assert caught.value.field == field


def test_calls_are_allowed_or_not_and_never_promised() -> None:
    assert [read_tool_choice(choice) for choice in (None, "auto", "none")] == [True, True, False]
    for forced in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(ChatFieldError, match="nobody can promise a call; use 'auto'"):
            read_tool_choice(forced)


@pytest.mark.parametrize(
    ("arguments", "canonical"),
    [
        ('{"b": [1, 2.0], "a": {"d": null, "c": true}}', '{"a":{"c":true,"d":null},"b":[1,2]}'),
        ('{"x": "\\u00fc\\n"}', '{"x":"ü\\n"}'),
        ("", "{}"),
        ('{"x": 1e300}', '{"x":1e+300}'),
        ("{ broken", "{ broken"),
    ],
)
def test_arguments_have_one_spelling(arguments: str, canonical: str) -> None:
    assert canonical_arguments(arguments) == canonical
    assert canonical_arguments(canonical) == canonical


def test_a_reply_is_told_as_openai_tells_it() -> None:
    told = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    assert reply_message("7", "", []) == {"role": "assistant", "content": "7", "refusal": None}
    assert reply_message("", "", []) == {"role": "assistant", "content": "", "refusal": None}
    assert reply_message("", "hm", [ADD]) == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": [told],
    }  # fmt: skip
    assert reply_delta("", "", [], 0) == {}
    assert reply_delta("x", "hm", [ADD, ADD], 1) == {
        "reasoning_content": "hm", "content": "x", "tool_calls": [{"index": 1, **told}, {"index": 2, **told}],
    }  # fmt: skip


def test_a_reply_that_was_cut_did_not_stop_for_its_calls() -> None:
    assert [finish_word("stop", 1), finish_word("stop", 0), finish_word("length", 1), finish_word("abort", 1)] == [
        "tool_calls", "stop", "length", "abort",
    ]  # fmt: skip
