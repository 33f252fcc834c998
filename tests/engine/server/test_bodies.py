"""Request bodies: what becomes a job, and what is refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl.engine.server.bodies import HARMLESS, NEUTRAL, Job, JobReader
from jaxrl.engine.server.chats import Chats
from jaxrl.engine.server.refusals import refusal_of
from jaxrl.inference.chat.conversations import ConversationMemory
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.rendering import Renderer

RENDERER = Renderer.from_pretrained(Path(__file__).parents[2] / "golden" / "tokenizer")
VOCAB = RENDERER.vocab_size
CHATS = Chats(RENDERER, ConversationMemory(10, 1000))
READER = JobReader(RENDERER, CHATS, "tiny", max_logprobs=3, vocab_size=VOCAB, window=32, max_sequences=6)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def read(kind: str, **body: Any) -> Job:
    return getattr(READER, kind)(json.dumps(body).encode())


def refusal(kind: str, **body: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(kind, **body)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [RENDERER.encode("ab").tolist()]),
        (["ab", "c"], [RENDERER.encode("ab").tolist(), RENDERER.encode("c").tolist()]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_a_prompt_is_a_text_token_ids_or_a_list_of_either(prompt: Any, prompts: list[list[int]]) -> None:
    job = read("completion", prompt=prompt, n=2)
    assert [ids.tolist() for ids in job.prompts] == prompts
    assert job.num_sequences == 2 * len(prompts)
    assert (job.sampling.max_tokens, job.num_top, job.prompt_top) == (16, None, None)


def test_choice_i_is_sampled_with_seed_plus_i_and_requests_have_names_of_their_own() -> None:
    job = read("completion", prompt=[[5], [6]], n=2, seed=2**63 - 1, model="tiny")
    requests = job.requests("x")
    assert [r.sampling.seed for r in requests] == [2**63 - 1, 0, 2**63 - 1, 0]
    assert [r.token_ids.tolist() for r in requests] == [[5], [5], [6], [6]]
    assert len({r.request_id for r in requests}) == 4


def test_without_a_seed_each_request_gets_one_of_its_own() -> None:
    seeds = {read("chat", **CHAT).sampling.seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_chat_is_rendered_by_the_template_and_may_fill_the_window() -> None:
    job = read("chat", **CHAT, logprobs=True, top_logprobs=2, max_completion_tokens=3, max_tokens=9)
    assert job.prompts[0].tolist() == RENDERER.open_turn(None, CHAT["messages"]).prompt_ids.tolist()
    assert (job.sampling.max_tokens, job.num_top) == (3, 2)
    assert read("chat", **CHAT).sampling.max_tokens > 10**6


def test_a_chat_takes_tools_and_says_whether_they_may_be_called() -> None:
    wide = JobReader(RENDERER, CHATS, "tiny", max_logprobs=3, vocab_size=VOCAB, window=4096, max_sequences=6)

    def turn(**body: Any) -> tuple[bool, bool, bool]:
        job = wide.chat(json.dumps(CHAT | body).encode())
        assert job.chat is not None and job.prompts[0].tolist() == job.chat.rendered.prompt_ids.tolist()
        return '"name": "f"' in RENDERER.decode(job.prompts[0]), job.chat.takes_calls, job.chat.is_parallel

    assert turn() == turn(tools=[], tool_choice="none") == turn(tool_choice="auto") == (False, False, True)
    assert turn(tools=[TOOL]) == turn(tools=[TOOL], tool_choice="auto", parallel_tool_calls=None) == (True, True, True)
    assert turn(tools=[TOOL], tool_choice="none", parallel_tool_calls=False) == (True, False, False)


def test_a_chat_of_thousands_of_messages_is_refused_in_time_that_is_linear_in_their_number() -> None:
    began = time.monotonic()
    refused = refusal("chat", messages=[{"role": "user", "content": ""}] * 4000)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")
    assert time.monotonic() - began < 5.0  # rendering the prompt of each message's turn takes many times as long


def test_stop_ids_are_the_models_and_the_requests() -> None:
    own = RENDERER.stop_ids
    job = read("completion", prompt="ab", stop_token_ids=[9, own[0]], stop="\n")
    assert set(job.sampling.stop_ids) == {9, *own} and job.user_stop_ids == {9} and job.sampling.stop == ("\n",)
    assert read("completion", prompt="ab", stop_token_ids=[9], ignore_eos=True).sampling.stop_ids == (9,)


def test_tokens_in_take_the_parameters_of_vllm() -> None:
    params = {"max_tokens": 4, "top_k": -1, "min_p": 0.1, "logprobs": 1, "prompt_logprobs": 0, "repetition_penalty": 1.0, "stop": []}
    body = {"token_ids": [5, 6], "sampling_params": params, "cache_salt": "v3", "request_id": "mine", "return_token_ids": True}
    job = read("generate", **body, stream=False)
    assert (job.sampling.top_k, job.num_top, job.prompt_top, job.request_id, job.returns_token_ids) == (0, 1, 0, "mine", True)


def test_null_means_left_out_and_a_value_that_changes_nothing_is_accepted() -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    unset = dict.fromkeys(NEUTRAL)
    harmless = dict.fromkeys(HARMLESS, "whatever")
    for extra in (neutral, unset, harmless, {"stop": None, "seed": None, "n": None}):
        assert read("completion", prompt="ab", **extra).num_choices == 1


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        ("completion", {"prompt": "x", "tools": [{}]}, "tools", "would change the reply"),
        ("completion", {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", "or set it to 0"),
        ("completion", {"prompt": "x", "echo": True}, "echo", "not supported"),
        ("chat", {**CHAT, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ("chat", {**CHAT, "reasoning_effort": "high"}, "reasoning_effort", "leave it out"),
        ("completion", {"prompt": "x", "maxtokens": 3}, "maxtokens", "did you mean `max_tokens`"),
        ("generate", {"token_ids": [5], "sampling_params": {"bogus": 1}}, "sampling_params.bogus", "unknown parameter"),
        ("completion", {}, "prompt", "missing"),
        ("completion", {"prompt": "x", "n": "2"}, "n", "expected `int`"),
        ("completion", {"prompt": "x", "n": 0}, "n", ">= 1, got 0"),
        ("completion", {"prompt": "x", "temperature": -1}, "temperature", ">= 0"),
        ("completion", {"prompt": "x", "top_p": 0}, "top_p", "> 0"),
        ("completion", {"prompt": "x", "seed": -1}, "seed", ">= 0"),
        ("completion", {"prompt": "x", "stop": [""]}, "stop", "length >= 1"),
        ("completion", {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids", "out of a vocabulary"),
        ("completion", {"prompt": "x", "stop_token_ids": [5] * 257}, "stop_token_ids", "length <= 256"),
        ("completion", {"prompt": "x", "stop": "x" * 1025}, "stop", "length <= 1024"),
        ("completion", {"prompt": "x", "y" * 999: 1}, "y" * 100, "unknown parameter"),
        ("completion", {"prompt": "x", "n": 7}, "n", "asks for 7 sequences .* holds 6 at most"),
        ("chat", {**CHAT, "n": 7}, "n", "asks for 7 sequences"),
        ("completion", {"prompt": [[VOCAB]] * 4, "n": 2}, "n", "asks for 8 sequences"),
        ("completion", {"prompt": ["x", ""] * 2, "n": 2}, "n", "asks for 8 sequences"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x" * 99_999}]},
            "messages",
            r"\d+ characters, more than fit into a window of 32",
        ),
        ("completion", {"prompt": "x", "logprobs": 4}, "logprobs", "above this server's `server.max_logprobs`=3"),
        ("completion", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ("chat", {**CHAT, "top_logprobs": 1}, "top_logprobs", "needs `logprobs`"),
        ("generate", {"token_ids": [5], "stream": True}, "stream", "answers at once"),
        ("generate", {"token_ids": [5], "sampling_params": {"n": 0}}, "sampling_params.n", ">= 1"),
        ("completion", {"prompt": []}, "prompt", "not empty"),
        ("completion", {"prompt": [5, "x"]}, "prompt", "list of token ids"),
        ("completion", {"prompt": [[5], [True]]}, "prompt", r"prompt\[1\].*got `bool`"),
        ("completion", {"prompt": [5, 2**40]}, "prompt", "<= 2147483647"),
        ("completion", {"prompt": [5, -1]}, "prompt", ">= 0"),
        ("completion", {"prompt": [5, VOCAB]}, "prompt", f"token id {VOCAB} at 1 is out of the model's vocabulary of {VOCAB}"),
        ("completion", {"prompt": [[]]}, "prompt", "holds no token"),
        ("generate", {"token_ids": [5] * 32}, "token_ids", "the prompt has 32 tokens, .* window of 32 .* shorten it to 31"),
        ("chat", {"messages": []}, "messages", "length >= 1"),
        ("chat", {"messages": [{"role": "user"}]}, "messages", "needs a `role` and a `content`"),
        ("chat", {"messages": [{"role": "tool", "content": "7"}]}, "messages", r"`messages\[0\].tool_call_id` must be a text"),
        ("chat", {**CHAT, "tools": {}}, "tools", "a list of tools"),
        ("chat", {**CHAT, "tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools", r"`tools\[0\].function.name`"),
        ("chat", {**CHAT, "tools": [TOOL, TOOL]}, "tools", "two tools are called 'f'"),
        ("chat", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tool_choice", "='required' is not supported.* use 'auto'"),
        ("chat", {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "nobody can promise a call"),
        ("chat", {**CHAT, "parallel_tool_calls": "no"}, "parallel_tool_calls", "expected `bool`"),
        ("completion", {"prompt": "x", "tools": [TOOL]}, "tools", "would change the reply"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(kind: str, body: dict, param: str, message: str) -> None:
    refused = refusal(kind, **body)
    assert (refused.status, refused.param) == (400, param)
    with pytest.raises(Refusal, match=message):
        raise refused


def test_an_oversized_prompt_has_a_code_of_its_own_and_another_model_is_a_404() -> None:
    assert refusal("completion", prompt=[5] * 99).code == "context_length_exceeded"
    refused = refusal("completion", prompt="x", model="gpt-5")
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("raw", [b"", b"{", b"nonsense", b"[1]", b'"x"', b'{"prompt": "\xff"}', b"[" * 5000])
def test_garbage_is_a_400(raw: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        READER.completion(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


def test_a_body_of_which_nothing_can_be_said_without_going_too_deep_is_the_clients_fault() -> None:
    kinds: set[str] = set()
    for depth in range(880, 1000):
        with pytest.raises((Refusal, RecursionError)) as raised:
            READER.chat(f'{{"messages": [{{"role": "user", "content": "hi"}}], "tool_choice": {"[" * depth}{"]" * depth}}}'.encode())
        kinds.add(raised.typename)
        assert refusal_of(raised.value).status == 400
    assert kinds == {"Refusal", "RecursionError"}
