"""Replies told in pieces: what is certain, what is held back, and that the pieces add up."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.inference.chat.reply_stream import ReplyTeller
from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.inference.rendering.tool_calls.hermes import Hermes
from jaxrl.inference.rendering.tool_calls.llama3 import Llama3
from jaxrl.inference.rendering.tool_calls.parser import CallParser
from tests.inference.rendering.styles import tokenizer_of

BACKENDS = {"hermes": tokenizer_of("qwen3").backend_tokenizer, "llama3": tokenizer_of("llama3").backend_tokenizer}
PARSERS = {"hermes": CallParser(BACKENDS["hermes"], Hermes()), "llama3": CallParser(BACKENDS["llama3"], Llama3())}
END = BACKENDS["hermes"].token_to_id("<|im_end|>")
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
BROKEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3\n</tool_call>'


def ids_of(text: str, style: str = "hermes") -> list[int]:
    return BACKENDS[style].encode(text, add_special_tokens=False).ids


def teller(style: str = "hermes", **more: Any) -> ReplyTeller:
    return ReplyTeller(lambda ids: PARSERS[style].parse(ids, turn=0), **{"takes_calls": True, "stop_ids": (END,)} | more)


def told(token_ids: list[int], stop: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the message of a reply that comes at once."""
    one = teller(**more)
    one.add(token_ids)
    one.end(stop)
    return one.message


def streamed(token_ids: list[int], sizes: list[int], stop: str | None = None, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the message of a reply that comes in pieces of these sizes, and the deltas."""
    one, at, deltas = teller(**more), 0, []
    for size in itertools.cycle(sizes):
        if at >= len(token_ids):
            break
        one.add(token_ids[at : at + size])
        deltas.append(one.delta())
        at += size
    deltas.append(one.end(stop))
    return one.message, deltas


def added_up(deltas: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
    """Return what a client makes of deltas: content, thinking, calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return content, reasoning, [{name: call[name] for name in ("id", "type", "function")} for call in calls]


def test_text_comes_with_its_tokens_and_a_call_when_its_end_is_known() -> None:
    text, call = ids_of("I add. "), ids_of(ADD)
    one = teller()
    one.add(text)
    assert one.delta() == {"content": "I add."}  # the space may belong to what follows
    for token_id in call[:-1]:
        one.add([token_id])
        assert one.delta() == {}
    one.add(call[-1:])
    function = {"name": "add", "arguments": '{"a": 3, "b": 4}'}
    assert one.delta() == {"tool_calls": [{"index": 0, "id": "call_0_0", "type": "function", "function": function}]}
    one.add([*ids_of(" Done."), END])
    assert (one.delta(), one.end(), one.num_calls) == ({"content": "  Done."}, {}, 1)


def test_thinking_is_told_as_thinking() -> None:
    message, deltas = streamed(ids_of("<think>\nadd them\n</think>\n\nSeven."), [1])
    assert (message["content"], message["reasoning_content"]) == ("Seven.", "add them")
    assert added_up(deltas)[:2] == ("Seven.", "add them")
    assert sum(bool(delta) for delta in deltas) > 5


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"A {BROKEN_CALL} B", 'A  B\n{"name": "add", "arguments": {"a": 3', 0),
        (f"{BROKEN_CALL}{ADD}", '{"name": "add", "arguments": {"a": 3', 1),
        ('<tool_call>\n{"name": "add"', '{"name": "add"', 0),
        (ADD + ADD, None, 2),
        ("", "", 0),
        ("  7 \n", "  7 \n", 0),
    ],
)
def test_what_is_no_call_is_told_as_text_and_nothing_is_lost(text: str, content: str | None, num_calls: int) -> None:
    message = told(ids_of(text))
    assert (message["content"], len(message.get("tool_calls", []))) == (content, num_calls)


def test_calls_that_the_client_has_no_place_for_are_text() -> None:
    written = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
    assert told(ids_of(f"So: {ADD}"), takes_calls=False) == {"role": "assistant", "content": f"So:\n{written}", "refusal": None}
    one_call = told(ids_of(ADD + ADD), is_parallel=False)
    assert (len(one_call["tool_calls"]), one_call["content"]) == (1, written)


def test_a_stop_text_ends_what_is_told_wherever_it_stands() -> None:
    ids = ids_of("Seven.\nUser: no")
    assert told(ids, stop="\nUser:")["content"] == "Seven."
    message, deltas = streamed(ids, [1], stop="\nUser:", stops=["\nUser:", "zzz"])
    assert (message["content"], added_up(deltas)[0]) == ("Seven.", "Seven.")
    assert told(ids_of("<think>hm stop"), stop=" stop")["reasoning_content"] == "hm"
    assert streamed(ids_of("a \nU"), [1], stops=["\nUser:"])[0]["content"] == "a \nU"


def test_json_that_may_be_a_call_is_held_back_until_it_is_known() -> None:
    call = '{"name": "add", "parameters": {"a": 3}}'
    for size in (1, 3, 50):
        message, deltas = streamed(ids_of(call, "llama3"), [size], style="llama3")
        assert (message["content"], [call["function"]["name"] for call in message["tool_calls"]]) == (None, ["add"])
        assert added_up(deltas)[0] == ""
    message, deltas = streamed(ids_of('{"answer": 7}', "llama3"), [1], style="llama3")
    assert (message["content"], [delta for delta in deltas if delta]) == ('{"answer": 7}', [{"content": '{"answer": 7}'}])
    _, deltas = streamed(ids_of('{"answer": 7}', "llama3"), [1], style="llama3", takes_calls=False)
    assert sum(bool(delta) for delta in deltas) > 3  # nobody waits for a call


def test_a_tag_that_is_no_token_is_not_told_as_text() -> None:
    parser = CallParser(BACKENDS["llama3"], Hermes())
    one = ReplyTeller(lambda ids: parser.parse(ids, turn=0), takes_calls=True)
    deltas = []
    for token_id in ids_of(f"So: {ADD}", "llama3"):
        one.add([token_id])
        deltas.append(one.delta())
    deltas.append(one.end())
    assert added_up(deltas)[0] == "So:" and one.num_calls == 1


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = ids_of("7 \U0001f600!")
    assert len(ids) > 5
    _, deltas = streamed(ids, [1])
    assert added_up(deltas)[0] == "7 \U0001f600!" and not any("\ufffd" in delta.get("content", "") for delta in deltas)
    assert told(ids_of("\U0001f600")[:1])["content"] == "\ufffd"  # what is no character is told in the end


def test_a_long_reply_is_taken_apart_in_steps_that_grow_with_it() -> None:
    parsed_at: list[int] = []

    def parse(token_ids: np.ndarray) -> ParsedReply:
        parsed_at.append(len(token_ids))
        return ParsedReply("x" * len(token_ids))

    one = ReplyTeller(parse)
    for _ in range(1280):
        one.add([5])
        one.delta()
    one.end()
    assert parsed_at[:127] == list(range(1, 128)) and parsed_at[-2:] == [1275, 1280] and len(parsed_at) < 430
    assert one.message["content"] == "x" * 1280


WORDS = ["a", " b", "\n", "{", '"', "<", "[", "é", "\U0001f600", ADD, BROKEN_CALL, "<tool_call>", "</tool_call>", "<think>x</think>"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=8), st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans())
def test_pieces_add_up_to_the_message_that_comes_at_once(words: list[str], sizes: list[int], takes_calls: bool) -> None:
    token_ids = ids_of("x" + "".join(words))
    whole = told(token_ids, takes_calls=takes_calls)
    message, deltas = streamed(token_ids, sizes, takes_calls=takes_calls)
    assert message == whole
    content, reasoning, calls = added_up(deltas)
    assert (content, reasoning, calls) == (whole["content"] or "", whole.get("reasoning_content", ""), whole.get("tool_calls", []))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BACKENDS["hermes"].get_vocab_size() - 1), max_size=40), st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_nothing_that_is_sampled_makes_a_stream_fail_or_differ_from_its_message(token_ids: list[int], sizes: list[int]) -> None:
    message, deltas = streamed(token_ids, sizes)
    content, reasoning, calls = added_up(deltas)
    assert (content, reasoning, calls) == (message["content"] or "", message.get("reasoning_content", ""), message.get("tool_calls", []))
    assert json.dumps(message)
