"""Calls of tools in sampled ids: found by id, read strictly, told to the policy in words when they are malformed, never an exception."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.inference.rendering.tool_calls import FORMATS, CallParser, call_text

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(GOLDEN))
"""Its vocabulary holds `<think>`, `<tool_call>` and their ends, and no tag of another format."""
CALL, END_CALL, THINK, END_THINK = (TOKENIZER.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>"))
ADD = '{"name": "add", "arguments": {"a": 8, "b": 3}}'


def ids(text: str) -> np.ndarray:
    """The ids of a text in which tags become their tokens."""
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)


def spelt(text: str) -> np.ndarray:
    """The ids of a text in which tags are spelt with ordinary tokens: `<` is encoded by itself."""
    pieces = [ids(piece) for part in text.split("<") for piece in ("<", part)][1:]
    return np.concatenate(pieces)


def read(text: str, call_format: str = "hermes", *, thinks_at_once: bool = False, turn: int = 0) -> ParsedReply:
    return CallParser(TOKENIZER, FORMATS[call_format], thinks_at_once=thinks_at_once).parse(ids(text), turn=turn)


def calls_of(reply: ParsedReply) -> list[tuple[str, dict | None]]:
    return [(call.name, call.arguments) for call in reply.tool_calls]


def test_a_reply_without_calls_is_content_letter_for_letter() -> None:
    assert read("  8 + 3 = 11\n") == ParsedReply(content="  8 + 3 = 11\n")
    assert read("") == ParsedReply(content="")


def test_calls_keep_their_order_and_the_text_around_them_stays_content() -> None:
    reply = read(f'One. <tool_call>\n{ADD}\n</tool_call>\nTwo.<tool_call>{{"name":"now","arguments":{{}}}}</tool_call> Three.', turn=2)
    assert calls_of(reply) == [("add", {"a": 8, "b": 3}), ("now", {})]
    assert [call.id for call in reply.tool_calls] == ["call_2_0", "call_2_1"]
    assert [call.raw for call in reply.tool_calls] == ['{"a": 8, "b": 3}', "{}"]
    assert reply.content == "One. \nTwo. Three."
    assert not reply.has_unread_call


def test_a_tag_spelt_with_ordinary_tokens_is_no_call_where_the_vocabulary_has_the_tag() -> None:
    parser = CallParser(TOKENIZER, FORMATS["hermes"])
    text = f"<tool_call>{ADD}</tool_call>"
    assert TOKENIZER.decode(spelt(text).tolist(), skip_special_tokens=False) == text
    reply = parser.parse(spelt(text), turn=0)
    assert reply.tool_calls == () and reply.content == text
    assert reply.has_unread_call  # and it is not lost without a trace
    assert len(parser.parse(ids(text), turn=0).tool_calls) == 1


def test_a_spelt_end_inside_of_a_call_does_not_end_it() -> None:
    quoted = spelt('{"name": "say", "arguments": {"text": "</tool_call>"}}')
    reply = CallParser(TOKENIZER, FORMATS["hermes"]).parse(np.concatenate([[CALL], quoted, [END_CALL]]), turn=0)
    assert calls_of(reply) == [("say", {"text": "</tool_call>"})]


def test_a_tag_that_is_no_token_is_read_from_the_text() -> None:
    reply = read('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 8}}, {"name": "now", "arguments": {}}]', "mistral", turn=2)
    assert calls_of(reply) == [("add", {"a": 8}), ("now", {})]
    assert [call.id for call in reply.tool_calls] == ["000200000", "000200001"]
    named = read('Wait.[TOOL_CALLS]add[ARGS]{"a": 8}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{} Done.', "mistral")
    assert calls_of(named) == [("add", {"a": 8}), ("now", {})]
    assert named.content == "Wait. Done."


def test_mistral_ids_are_nine_letters_and_digits_and_differ() -> None:
    made = {FORMATS["mistral"].call_id(turn, index) for turn in range(40) for index in range(40)}
    assert len(made) == 1600
    assert all(len(one) == 9 and one.isalnum() for one in made)


def test_a_llama_reply_is_a_call_if_the_whole_of_it_is_one() -> None:
    call = '{"name": "add", "parameters": {"a": 8}}'
    assert calls_of(read(call, "llama3")) == [("add", {"a": 8})]
    assert calls_of(read(f"<|python_tag|>{call}; {call}", "llama3")) == [("add", {"a": 8})] * 2
    said = read(f"I would call {call}", "llama3")
    assert said.tool_calls == () and said.has_unread_call
    answer = read('{"name": "Ada", "age": 36}', "llama3")  # an answer in JSON calls nothing
    assert answer.tool_calls == () and answer.content == '{"name": "Ada", "age": 36}'
    (cut,) = read('{"name": "add", "parameters": {"a": 8', "llama3").tool_calls
    assert (cut.name, cut.arguments) == ("add", None) and "got the end" in cut.error


def test_an_xml_value_is_json_if_it_can_be_and_else_a_text() -> None:
    reply = read(
        "<tool_call>\n<function=f>\n<parameter=count>\n3\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=none>\nnull\n"
        "</parameter>\n<parameter=code>\nif a:\n    b\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "xml",
    )
    arguments = {"count": 3, "on": True, "none": None, "code": "if a:\n    b", "list": [1, 2]}
    assert calls_of(reply) == [("f", arguments)]
    assert json.loads(reply.tool_calls[0].raw) == arguments


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (f"<think>\nadd them\n</think>\n\n<tool_call>{ADD}</tool_call>", "add them", "", ["add"]),
        ("<think></think>11", "", "11", []),
        ("<think>8 + 3", "8 + 3", "", []),
        ("8 + 3</think>11", "8 + 3", "11", []),
        (f"<think>a</think>b<think>c</think><tool_call>{ADD}</tool_call>d", "a\nc", "bd", ["add"]),
        (f"<think>I could <tool_call>{ADD}</tool_call></think>no", f"I could <tool_call>{ADD}</tool_call>", "no", []),
    ],
)
def test_thinking_is_set_apart_and_a_call_in_it_is_a_thought(text: str, reasoning: str, content: str, names: list[str]) -> None:
    reply = read(text)
    assert (reply.reasoning, reply.content, [call.name for call in reply.tool_calls]) == (reasoning, content, names)


def test_thinking_that_the_generation_prompt_opened_needs_no_tag() -> None:
    assert read("8 + 3", thinks_at_once=True) == ParsedReply(content="", reasoning="8 + 3")
    closed = read(f"8 + 3\n</think>\nSo <tool_call>{ADD}</tool_call>", thinks_at_once=True)
    assert (closed.reasoning, closed.content, calls_of(closed)) == ("8 + 3", "So", [("add", {"a": 8, "b": 3})])
    opened_again = read("<think>8 + 3</think>11", thinks_at_once=True)
    assert (opened_again.reasoning, opened_again.content) == ("8 + 3", "11")


def test_a_call_that_the_thinking_never_left_is_counted_as_unread() -> None:
    lost = read(f"<think>now <tool_call>{ADD}</tool_call>")
    assert lost.tool_calls == () and lost.has_unread_call
    assert not read(f"<think>maybe <tool_call>{ADD}</tool_call></think>11").has_unread_call
    assert not read(f"<tool_call>{ADD}</tool_call> [TOOL_CALLS]").has_unread_call  # another one was read, and is answered


@pytest.mark.parametrize(
    "text",
    [
        "<function=add><parameter=a>8</parameter></function>",
        '[TOOL_CALLS][{"name": "add", "arguments": {}}]',
        f"```json\n{ADD}\n```",
        '<|python_tag|>add.call(a="8")',
        "</tool_call>",
    ],
)
def test_another_formats_call_is_content_that_is_counted(text: str) -> None:
    reply = read(text)
    assert reply.tool_calls == () and reply.has_unread_call and reply.content == text


@pytest.mark.parametrize(
    ("call_format", "text", "name", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "add", "expecting ',' delimiter after"),
        ("hermes", "<tool_call>add(8, 3)</tool_call>", "", "expected '{' after 0 characters, got 'add(8, 3)'"),
        ("hermes", "<tool_call></tool_call>", "", "got the end"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "", "under `name`, got the keys 'arguments'"),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', "", "under `name`, got '7'"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "add", "under `arguments`, got no other key beside"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [8, 3]}</tool_call>', "add", "object under `arguments`, got '[8, 3]'"),
        ("hermes", f"<tool_call>{ADD}", "add", "expected </tool_call> after the JSON object, got the end"),
        ("hermes", f"<tool_call>{ADD}{ADD}</tool_call>", "add", "expected </tool_call> after the JSON object, got"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "add", "the key 'a' stands there twice"),
        ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "a", "the key 'name' stands there twice"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "add", "NaN is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "add", "beyond what a float holds"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>' % ("9" * 400), "add", "beyond what a float holds"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>' % ("9" * 9000), "add", "beyond what a float holds"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "add", "half of a surrogate pair"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"\\udc00": 1}}</tool_call>', "add", "half of a surrogate pair"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>' % ("[" * 65 + "]" * 65),
            "add",
            "nested deeper than 64",
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": %s' % ("[" * 5000), "add", "nested deeper than 64"),
        ("hermes", "<tool_call><function=add></function></tool_call>", "", "expected '{'"),
        ("llama3", "<|python_tag|>add(8, 3)", "", "expected '{' after 0 characters, got 'add(8, 3)'"),
        ("llama3", '{"name": "add", "parameters": 8}', "add", "object under `parameters`, got '8'"),
        ("llama3", '<|python_tag|>{"name": "add", "arguments": {}}', "add", "under `parameters`, got the keys 'arguments'"),
        ("mistral", "[TOOL_CALLS]", "", "expected a JSON list, or a tool's name and [ARGS]"),
        ("mistral", "[TOOL_CALLS][]", "", "got an empty one"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}', "add", "expected ',' or ']' after 39 characters, got the end"),
        ("mistral", "[TOOL_CALLS]add[ARGS]8", "add", "the arguments cannot be read: expected '{'"),
        ("mistral", "[TOOL_CALLS] [ARGS]{}", "", "expected the tool's name between"),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n8\n</function>\n</tool_call>", "add", "with its </parameter>"),
        ("xml", f"<tool_call>{ADD}</tool_call>", "", "expected <function=the tool's name> after 0 characters"),
        ("xml", "<tool_call><function=add></function>", "add", "expected </tool_call> after </function>, got the end"),
        (
            "xml",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "f",
            "parameter 'a' stands",
        ),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error_in_words(call_format: str, text: str, name: str, error: str) -> None:
    reply = read(text, call_format, turn=1)
    *_, call = reply.tool_calls
    assert call.arguments is None and call.name == name
    assert error in call.error
    assert len(call.error) < 200  # it is said to the policy, however long the call was
    assert call.raw in text
    assert not reply.has_unread_call


def test_a_malformed_call_takes_no_other_call_with_it() -> None:
    reply = read(f'<tool_call>{{"a": </tool_call>mid<tool_call>{ADD}<tool_call>{ADD}</tool_call>end')
    assert calls_of(reply) == [("", None), ("add", None), ("add", {"a": 8, "b": 3})]
    assert [call.id for call in reply.tool_calls] == ["call_0_0", "call_0_1", "call_0_2"]
    assert reply.content == "midend"
    in_list = read('[TOOL_CALLS][{"name": "add", "arguments": {}}, {"arguments": {}}, {"name": ', "mistral")
    assert [call.error == "" for call in in_list.tool_calls] == [True, False, False]


def test_characters_split_over_tokens_are_whole_in_arguments() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"text": "😀日本"}}</tool_call>'
    assert len(ids("😀")) > 1
    assert calls_of(read(text)) == [("say", {"text": "😀日本"})]


def test_half_of_a_character_next_to_a_tag_is_shown_as_unknown_and_shifts_nothing() -> None:
    half = ids("😀")[:2]
    reply = CallParser(TOKENIZER, FORMATS["hermes"]).parse(np.concatenate([half, ids(f"<tool_call>{ADD}</tool_call>"), half]), turn=0)
    assert calls_of(reply) == [("add", {"a": 8, "b": 3})]
    assert set(reply.content) == {"\ufffd"}


TAGS = ["</tool_call>", "<tool_call>", "</think>", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "<|im_end|>"]
TEXTS = st.text(max_size=12) | st.sampled_from([*TAGS, "True", "3", ' "x" ', "\n"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z][a-z_0-9]{0,7}", fullmatch=True), VALUES, max_size=3)


@pytest.mark.parametrize("call_format", FORMATS)
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["add", "get_time", "f2"]), ARGUMENTS), min_size=1, max_size=3))
def test_what_is_written_is_read_back_whatever_the_strings_hold(call_format: str, calls: list[tuple[str, dict]]) -> None:
    text = "".join(call_text(call_format, name, arguments) for name, arguments in calls)
    reply = read(text, call_format)
    assert calls_of(reply) == calls
    assert reply.content == ""


@pytest.mark.parametrize("call_format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
                *('{"name": "add", ', '"parameters": {}}', '"arguments": {}}', '"', "\\", "\\ud800", "<function=f>", "<parameter=x>"),
                *("[", "]", "{", "}", ",", ";"),
                *("</parameter>", "</function>", "NaN", "1e999", " ", "\n", "😀", "9" * 30, "a"),
            ]
        )
        | st.text(max_size=3),
        max_size=14,
    ),
    cut=st.integers(0, 40),
    thinks_at_once=st.booleans(),
)
def test_no_reply_makes_the_parser_raise_and_every_call_can_be_written_down(
    call_format: str, pieces: list[str], cut: int, thinks_at_once: bool
) -> None:
    token_ids = ids("".join(pieces))
    reply = CallParser(TOKENIZER, FORMATS[call_format], thinks_at_once=thinks_at_once).parse(token_ids[cut:], turn=3)
    for call in reply.tool_calls:
        assert (call.arguments is None) == bool(call.error)
        json.dumps([call.name, call.arguments, call.raw, call.error], ensure_ascii=False, allow_nan=False).encode()
    assert len({call.id for call in reply.tool_calls}) == len(reply.tool_calls)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_no_ids_make_the_parser_raise(token_ids: list[int]) -> None:
    for call_format in FORMATS.values():
        CallParser(TOKENIZER, call_format).parse(np.asarray(token_ids, np.int32), turn=0)


def test_a_reply_of_nothing_but_tags_is_as_many_malformed_calls() -> None:
    calls = read("<tool_call>" * 4000).tool_calls
    assert len({call.id for call in calls}) == 4000 and {call.arguments for call in calls} == {None}
    (call,) = read("<think></think>" * 4000 + f"<tool_call>{ADD}</tool_call>").tool_calls
    assert call.arguments == {"a": 8, "b": 3}
    assert len(read("[TOOL_CALLS]" * 2000, "mistral").tool_calls) == 2000
