"""What is sent to a server, and that no answer is believed which is not exactly about the tokens that were sent."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from jaxrl.errors import EngineError
from jaxrl.inference import wire
from jaxrl.inference.endpoint import ChatReply, ChatRequest, FinishReason, GenerateRequest, TokenSampling
from jaxrl.types import ToolCall

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = TokenSampling(max_tokens=3, temperature=0.5, seed=2**63 - 1, stop_ids=(9,), stop=("end",))
REQUEST = GenerateRequest("r", PROMPT, SAMPLING)

TOKENS_ANSWER: dict[str, Any] = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [8, 9],
            "logprobs": {"content": [{"token_id": 8, "logprob": -0.5}, {"token_id": 9, "logprob": -0.25}]},
        }
    ],
}
COMPLETION_ANSWER: dict[str, Any] = {
    "choices": [
        {
            "finish_reason": "stop",
            "text": "whatever",
            "token_ids": [8, 9],
            "prompt_token_ids": [5, 6, 7],
            "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["token_id:8", "token_id:9"]},
        }
    ]
}
SCORES: list[Any] = [None, {"6": {"logprob": -0.5}, "1": {"logprob": -0.1}}, {"2": {"logprob": -0.2}, "7": {"logprob": -1.5}}]
ANSWERS = {wire.TOKENS_PATH: TOKENS_ANSWER, wire.COMPLETIONS_PATH: COMPLETION_ANSWER}


def read(answer: Any, path: str = wire.TOKENS_PATH):
    return wire.read_generation(json.dumps(answer).encode(), path, REQUEST)


def score(entries: Any, **more: Any) -> np.ndarray:
    answer = {"choices": [{}], "prompt_logprobs": entries, **more}
    return wire.read_scores(json.dumps(answer).encode(), PROMPT)


def changed(answer: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """Return an answer whose choice has other fields."""
    answer = copy.deepcopy(answer)
    answer["choices"][0].update(choice)
    return answer


@pytest.mark.parametrize("path", ANSWERS)
def test_every_setting_is_sent_so_that_the_servers_own_defaults_do_not_come_in(path: str) -> None:
    body = wire.generate_body(path, "toy", REQUEST)
    settings = body["sampling_params"] if path == wire.TOKENS_PATH else body
    assert body["token_ids" if path == wire.TOKENS_PATH else "prompt"] == [5, 6, 7]
    expected = {"max_tokens": 3, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert expected.items() <= settings.items()
    assert (settings["seed"], settings["stop"], settings["stop_token_ids"]) == (2**63 - 1, ["end"], [9])
    json.dumps(body)  # plain numbers only


@pytest.mark.parametrize("path", ANSWERS)
def test_a_generation_is_the_ids_and_logprobs_of_the_answer_and_has_no_policy_version(path: str) -> None:
    generation = read(ANSWERS[path], path)
    assert generation.token_ids.tolist() == [8, 9] and generation.token_ids.dtype == np.int32
    assert generation.logprobs.tolist() == [-0.5, -0.25] and generation.logprobs.dtype == np.float32
    assert generation.versions.tolist() == [-1, -1]
    assert generation.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token_ids": None}, "returned text and no token ids, and text is never tokenised again"),
        ({"token_ids": ["8", 9]}, "`token_ids` holds '8' at position 0, expected a token id"),
        ({"token_ids": [8, True]}, "`token_ids` holds True at position 1"),
        ({"token_ids": [8, -1]}, "`token_ids` holds -1 at position 1"),
        ({"token_ids": [8]}, "1 tokens and 2 logprobs"),
        ({"token_ids": [8, 9, 9, 9]}, "returned 4 tokens, asked for at most 3"),
        ({"token_ids": [8, 7]}, "the logprob of sampled token 1 is for id 9, and the token's id is 7"),
        ({"finish_reason": "tool_calls"}, "`finish_reason`='tool_calls'"),
        ({"finish_reason": ["stop"]}, r"`finish_reason`=\['stop'\]"),
        ({"logprobs": None}, "no logprobs of the sampled tokens"),
        ({"prompt_token_ids": [5, 6]}, "the prompt was 2 tokens, 3 were sent, and they differ from position 2 on"),
        ({"prompt_token_ids": [5, 4, 7]}, "they differ from position 1 on"),
    ],
)
@pytest.mark.parametrize("path", ANSWERS)
def test_an_answer_that_is_not_about_these_tokens_is_refused(path: str, fields: dict[str, Any], said: str) -> None:
    answer = changed(ANSWERS[path], **fields)
    if "prompt_token_ids" in fields:
        answer.pop("prompt_token_ids", None)
    with pytest.raises(EngineError, match=said.replace("(", r"\(")):
        read(answer, path)


@pytest.mark.parametrize("number", [None, float("nan"), float("-inf"), "-0.5", True, 0.5, -9999.0, -1e300, -(10**400), [1]])
def test_a_sampled_token_needs_a_finite_logprob(number: object) -> None:
    content = [{"token_id": 8, "logprob": -0.5}, {"token_id": 9, "logprob": number}]
    with pytest.raises(EngineError, match=r"the logprob of sampled token 1 is .*, expected a finite number of at most 0"):
        read(changed(TOKENS_ANSWER, logprobs={"content": content}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>busy</html>", "not JSON: '<html>busy"),
        (b"[1]", "a JSON list, expected an object"),
        (b"[" * 100_000, "not JSON: '\\[\\[\\["),
        (b'{"choices": [', "not JSON"),
        (b'{"choices": []}', r"`choices`=\[\], expected a list of one choice"),
        (b'{"choices": [{}, {}]}', "expected a list of one choice"),
    ],
)
def test_garbage_is_refused_and_shown(content: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        wire.read_generation(content, wire.TOKENS_PATH, REQUEST)
    with pytest.raises(EngineError, match=said):
        wire.read_scores(content, PROMPT)


def test_a_score_is_taken_by_the_exact_id_wherever_it_stands_in_the_entry() -> None:
    assert score(SCORES).tolist() == [0.0, -0.5, -1.5]
    answer = {"choices": [{"prompt_logprobs": SCORES}]}  # where completions put it
    assert wire.read_scores(json.dumps(answer).encode(), PROMPT).tolist() == [0.0, -0.5, -1.5]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (None, "gave no `prompt_logprobs`"),
        (SCORES[:2], "for 2 tokens, expected 3"),
        ([*SCORES, {"8": {"logprob": -1.0}}], "for 4 tokens, expected 3"),
        ([None, {"1": {"logprob": -0.1}}, SCORES[2]], "position 1 is for the ids 1, the token there is 6: the server scored another"),
        ([None, None, SCORES[2]], "position 1 is None"),
        ([None, SCORES[1], {"7": {"logprob": float("nan")}}], "token 7 at position 2 is nan"),
        ([None, SCORES[1], {"7": {"logprob": -9999.0}}], r"token 7 at position 2 is -9999.0 \(-9999 stands for minus infinity\)"),
        ([None, SCORES[1], {"7": {}}], "token 7 at position 2 is None"),
    ],
)
def test_a_score_with_a_hole_another_id_or_another_length_is_refused(entries: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        score(entries)


def test_a_score_of_another_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="it changes prompts"):
        score(SCORES, prompt_token_ids=[1, 5, 6, 7])


def test_models_are_listed_with_the_window_that_the_server_tells() -> None:
    content = json.dumps({"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]}).encode()
    assert wire.read_models(content) == {"a": 8, "b": None}
    with pytest.raises(EngineError, match="no OpenAI-compatible server"):
        wire.read_models(b'{"data": "x"}')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"error": {"message": "bad  thing", "code": 400}}', "bad thing"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["x"]}]}', '[{"loc": ["x"]}]'),
        (b"plain\ntext", "plain text"),
        (b"x" * 600, "x" * 500 + "..."),
        (b"[" * 100_000, "[" * 500 + "..."),
        (b'{"error": "half a \\ud83d pair"}', "half a ? pair"),
    ],
)
def test_what_a_server_says_is_wrong_is_one_line(content: bytes, said: str) -> None:
    assert wire.read_problem(content) == said


def test_a_salt_is_sent_where_there_is_one_and_logprobs_are_asked_for_where_they_are_wanted() -> None:
    for path in (wire.TOKENS_PATH, wire.COMPLETIONS_PATH):
        salted = wire.generate_body(path, "m", dataclasses.replace(REQUEST, cache_salt="v3"))
        assert salted == wire.generate_body(path, "m", REQUEST) | {"cache_salt": "v3"}
        quiet = wire.generate_body(path, "m", dataclasses.replace(REQUEST, wants_logprobs=False))
        settings = quiet["sampling_params"] if path == wire.TOKENS_PATH else quiet
        assert "logprobs" not in settings and settings["seed"] == SAMPLING.seed


@pytest.mark.parametrize("path", ANSWERS)
def test_logprobs_that_nobody_wanted_are_nan_and_may_be_missing(path: str) -> None:
    request = dataclasses.replace(REQUEST, wants_logprobs=False)
    generation = wire.read_generation(json.dumps(changed(ANSWERS[path], logprobs=None)).encode(), path, request)
    assert generation.token_ids.tolist() == [8, 9] and np.isnan(generation.logprobs).all() and len(generation.logprobs) == 2


CHAT = ChatRequest("r", ({"role": "user", "content": "hi"},), SAMPLING)
CHAT_ANSWER: dict[str, Any] = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "yo"}}]}


def say(answer: Any) -> ChatReply:
    return wire.read_chat(json.dumps(answer).encode(), CHAT)


def test_a_chat_is_asked_for_with_every_setting_but_ids_of_a_vocabulary_that_is_not_the_servers() -> None:
    assert wire.chat_body("m", CHAT) == {
        "model": "m",
        "stream": False,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 2**63 - 1,
        "n": 1,
        "stop": ["end"],
    }


def test_what_a_servers_tokenizer_says_is_ids_or_a_text_and_nothing_else() -> None:
    assert wire.read_tokenized(b'{"tokens": [5, 6], "count": 2}').tolist() == [5, 6]
    assert wire.read_detokenized('{"prompt": "naïve\\n"}'.encode()) == "naïve\n"
    for content in (b'{"tokens": [5, "6"]}', b"{}", b"[]", b"<html>"):
        with pytest.raises(EngineError, match=r"expected|not JSON"):
            wire.read_tokenized(content)
        with pytest.raises(EngineError, match=r"expected|not JSON"):
            wire.read_detokenized(content)


def test_a_chat_reply_is_its_text_and_how_it_ended() -> None:
    assert say(CHAT_ANSWER) == ChatReply("yo", is_stopped=True)
    assert say(changed(CHAT_ANSWER, finish_reason="length")) == ChatReply("yo", is_stopped=False)
    assert say(changed(CHAT_ANSWER, stop_reason=9)) == ChatReply("yo", is_stopped=True), "a stop id of the server's own"
    assert say(changed(CHAT_ANSWER, stop_reason="end")) == ChatReply("yoend", is_stopped=True, stop_string="end")
    assert say(changed(CHAT_ANSWER, message={"content": ""})) == ChatReply("", is_stopped=True)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"message": {"content": None, "tool_calls": [{}]}}, "expected one with a text as `content`"),
        ({"message": "yo"}, "expected one with a text"),
        ({"finish_reason": "content_filter"}, "`finish_reason`='content_filter'"),
        ({"finish_reason": "abort"}, "gave the reply up before its end"),
    ],
)
def test_a_chat_answer_that_is_no_reply_is_an_error(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        say(changed(CHAT_ANSWER, **choice))


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OFFERED = dataclasses.replace(CHAT, tools=(ADD,))


def called(arguments: Any, **call: Any) -> dict[str, Any]:
    """Return an answer that calls `add`."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}, **call}]
    return changed(CHAT_ANSWER, finish_reason="tool_calls", message={"role": "assistant", "content": None, "tool_calls": calls})


def hear(answer: Any) -> ChatReply:
    return wire.read_chat(json.dumps(answer).encode(), OFFERED)


def test_tools_and_what_they_said_are_sent_as_openai_has_them_and_thinking_is_not() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    messages = (
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    )
    body = wire.chat_body("m", dataclasses.replace(OFFERED, messages=messages))
    assert body["tools"] == [ADD]
    assert body["messages"] == [
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": {"name": "add", "arguments": '{"a": 3}'}}]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    ]


def test_calls_thinking_and_counts_of_an_answer_are_read() -> None:
    assert hear(called(' {"a": 3}')).tool_calls == (ToolCall("c1", "add", {"a": 3}, raw=' {"a": 3}'),)
    assert hear(called("")).tool_calls == (ToolCall("c1", "add", {}, raw="{}"),)
    (malformed,) = hear(called('{"a": 3} and more')).tool_calls
    assert malformed.arguments is None and "no JSON object" in malformed.error and malformed.raw == '{"a": 3} and more'
    thought = changed(CHAT_ANSWER, message={"content": "7", "reasoning_content": "3 + 4"}) | {
        "usage": {"completion_tokens": 5, "prompt_tokens": 9}
    }
    assert say(thought) == ChatReply("7", is_stopped=True, reasoning="3 + 4", num_tokens=5, num_prompt_tokens=9)
    assert say(CHAT_ANSWER | {"usage": {"completion_tokens": "5"}}).num_tokens is None


def test_a_call_is_no_reply_where_no_tool_was_offered_or_where_it_is_none() -> None:
    with pytest.raises(EngineError, match="expected one of"):
        say(called("{}"))
    for answer in (called(7), called("{}", id=None), changed(CHAT_ANSWER, message={"content": None, "tool_calls": "add"})):
        with pytest.raises(EngineError, match="expected"):
            hear(answer)


def test_settings_beyond_openais_are_left_out_only_where_they_change_nothing() -> None:
    plain = wire.chat_body("m", CHAT, is_plain=True)
    assert wire.chat_body("m", CHAT).keys() - plain.keys() == {"top_k", "min_p", "repetition_penalty"}
    assert wire.refuses_extensions("Unrecognized request argument supplied: top_k", CHAT)
    assert not wire.refuses_extensions("no such model", CHAT)
    narrow = dataclasses.replace(CHAT, sampling=dataclasses.replace(SAMPLING, top_k=5))
    assert not wire.refuses_extensions("unknown: top_k", narrow)
