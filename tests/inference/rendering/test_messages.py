"""Messages and tools as OpenAI's API has them become plain copies; nothing of the caller's is changed."""

import copy
import re
from typing import Any

import pytest

from jaxrl.errors import EnvError
from jaxrl.inference.rendering.messages import plain_messages, plain_tools, told_apart, whole_characters, with_arguments_as_text
from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.types import ToolCall
from tests.inference.rendering.handmade import ADD, CALLS, assistant, bodies, golden, user, with_template


def test_content_given_as_text_parts_is_joined() -> None:
    parts = user([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}])
    assert plain_messages([parts])[0]["content"] == "42"
    assert golden().open_turn(None, [parts]).text == golden().open_turn(None, [user("42")]).text


@pytest.mark.parametrize("content", [None, 4, [], ["4"], [{"type": "image", "url": "x"}], [{"text": "4"}, {"type": "image"}]])
def test_content_that_is_no_text_is_refused_rather_than_rendered_empty(content: object) -> None:
    with pytest.raises(EnvError, match="text parts"):
        plain_messages([user(content)])


def test_a_turn_needs_a_message_with_a_role() -> None:
    with pytest.raises(EnvError, match="at least one"):
        plain_messages([])
    with pytest.raises(EnvError, match="needs a `role`"):
        plain_messages([{"content": "hi"}])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"role": "user", "content": "hi"}, "messages must be a list of them, got {'role': 'user', 'content': 'hi'}"),
        (4, "messages must be a list of them, got 4"),
        (["hi"], "a message must be an object with a `role` and a `content`, got 'hi'"),
    ],
)
def test_what_is_no_list_of_messages_is_told_in_words(said: Any, words: str) -> None:
    with pytest.raises(EnvError, match=re.escape(words)):
        plain_messages(said)


def test_a_reply_that_calls_tools_needs_no_text_and_no_other_message_goes_without() -> None:
    for message in (assistant(None, {"a": 1}), {key: value for key, value in assistant(None, {"a": 1}).items() if key != "content"}):
        assert plain_messages([message])[0]["content"] == ""
    with pytest.raises(EnvError, match="text parts"):
        plain_messages([{**assistant(None, {"a": 1}), "role": "user"}])
    with pytest.raises(EnvError, match="text parts"):
        plain_messages([{"role": "assistant", "tool_calls": []}])


def test_messages_and_tools_are_copied_and_never_changed() -> None:
    messages = [user([{"text": "4"}]), assistant(None, {"a": [1, {"b": None}]}, '{"a": 1}'), {**user("x"), "name": None}]
    tools = [copy.deepcopy(ADD)]
    before = copy.deepcopy((messages, tools))
    plain, schemas = plain_messages(messages), plain_tools(tools)
    golden().open_turn(None, messages, tools=tools)
    assert (messages, tools) == before
    plain[1]["tool_calls"][0]["function"]["arguments"]["a"][1]["b"] = 5
    schemas[0]["function"]["name"] = "other"
    assert (messages, tools) == before


def test_arguments_are_an_object_where_they_parse_to_one_and_the_text_where_they_do_not() -> None:
    cases = ['{"a": true, "b": null}', '{"a": 1', "[1]", '"x"', "", '{"a": NaN}', "[" * 100_000]
    calls = plain_messages([assistant("", *cases)])[0]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": True, "b": None}, *cases[1:]]
    assert calls[0] == {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": {"a": True, "b": None}}}


@pytest.mark.parametrize(
    "call", [None, "add", {}, {"function": {}}, {"function": {"name": "add", "arguments": 4}}, {"name": "add", "arguments": {}}]
)
def test_a_call_of_another_shape_is_refused(call: object) -> None:
    with pytest.raises(EnvError, match="a call of a tool needs the shape"):
        plain_messages([{"role": "assistant", "tool_calls": [call]}])


def test_what_is_no_json_is_refused_by_name() -> None:
    with pytest.raises(EnvError, match="the arguments of 'add' must be JSON"):
        plain_messages([assistant("", {"a": object()})])
    with pytest.raises(EnvError, match="the schemas of tools must be JSON"):
        plain_tools([{"a": float("nan")}])
    with pytest.raises(EnvError, match="must be a JSON object"):
        plain_tools(["add"])  # pyright: ignore[reportArgumentType]


def test_what_is_null_or_empty_is_as_good_as_absent() -> None:
    message = {"role": "assistant", "content": "4", "tool_calls": None, "refusal": None, "reasoning_content": None}
    assert plain_messages([message]) == ({"role": "assistant", "content": "4"},)
    assert plain_messages([{**message, "tool_calls": []}]) == ({"role": "assistant", "content": "4"},)


def test_halves_of_characters_are_replaced_since_no_tokenizer_takes_them() -> None:
    assert whole_characters("a\ud83d\ude00b\udc00") == "a\ufffd\ufffdb\ufffd" and whole_characters("é😀") == "é😀"
    turn = golden().open_turn(None, [user("half \ud83d"), user("ok")])
    assert turn.text.startswith("<|im_start|>user\nhalf \ufffd<|im_end|>")
    assert bodies(turn) == ["half \ufffd", "ok"]
    called = with_template(CALLS).open_turn(None, [user("hi"), assistant("", '{"a": "\\ud83d"}')])
    assert '{"a": "\ufffd"}' in called.text


def test_replies_are_told_apart_and_other_messages_are_left_alone() -> None:
    calls = (ToolCall("call_0_0", "add", {"a": 1}, '{"a": 1}'), ToolCall("call_0_1", "", None, "{oops", "broken"))
    replies = {1: ParsedReply("4", reasoning="2+2", tool_calls=calls), 3: ParsedReply("ok")}
    told = told_apart((user("hi"), assistant("raw"), user("so"), assistant("raw")), replies)
    assert told[::2] == (user("hi"), user("so")) and told[3] == {"role": "assistant", "content": "ok"}
    functions = [call["function"] for call in told[1]["tool_calls"]]
    assert functions == [{"name": "add", "arguments": {"a": 1}}, {"name": "", "arguments": "{oops"}]
    assert (told[1]["content"], told[1]["reasoning_content"]) == ("4", "2+2")


def test_arguments_as_text_are_valid_json_with_their_characters() -> None:
    plain = plain_messages([assistant("", {"a": True, "b": None, "c": "é"}, "{oops"), user("hi")])
    told = with_arguments_as_text(plain)
    assert [call["function"]["arguments"] for call in told[0]["tool_calls"]] == ['{"a": true, "b": null, "c": "é"}', "{oops"]
    assert told[1] is plain[1] and plain[0]["tool_calls"][0]["function"]["arguments"] == {"a": True, "b": None, "c": "é"}
