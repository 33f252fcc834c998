"""Chats over several turns, by the `openai` client on a real socket: tools, streams, and tokens that go on from what was sampled.

What is sampled is given by a script, so that replies can hold what a tiny model would not write, in tokens that no tokenizer would choose.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from jaxrl.inference.endpoint import GenerateRequest
from tests.engine.server.scripted import Served, served
from tests.inference.rendering.styles import ADD, renderer_of

RENDERER = renderer_of("chatml")
END = RENDERER.turn_end_id
EXACT = {"return_token_ids": True}
QUESTION = {"role": "user", "content": "What is 3 + 4, and 5 + 6?"}


def spelt(text: str) -> list[int]:
    """Return a text letter by letter, tags and line breaks apart: a token each, whatever the tokenizer would make of it."""
    ids: list[int] = []
    while text:
        tag = next((tag for tag in ("<tool_call>", "</tool_call>", "<think>", "</think>") if text.startswith(tag)), text[0])
        ids += RENDERER.encode(tag, add_special_tokens=False).tolist()
        text = text[len(tag) :]
    return ids


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


REPLIES = [
    [*spelt(f"<think>add them</think>Adding. {call(3, 4)}{call(5, 6)}"), END],
    [*spelt('So: <tool_call>\n{"name": "add", "arguments": {"a": 7,\n</tool_call>'), END],  # never run, and not lost
    spelt("It is 7 and"),  # cut by `max_tokens`
    [*spelt(call(7, 11)), END],
    [*spelt("\U0001f600 18."), END],
]
"""What the model says in five turns."""


class Episode:
    """An agent that knows nothing but OpenAI's API: it keeps words, answers calls, and records the tokens that it is told."""

    def __init__(self, client: openai.OpenAI, *, is_stream: bool, **extra: Any) -> None:
        self.client = client
        self.is_stream = is_stream
        self.extra = EXACT | extra
        self.messages: list[Any] = [QUESTION]
        self.turns: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each turn, in ids."""
        self.ends: list[str] = []

    def ask(self, **settings: Any) -> Any:
        """Let the model reply and keep the message; return it."""
        settings = {"model": "tiny", "messages": self.messages, "tools": [ADD], "extra_body": self.extra} | settings
        prompt, ids, end, message = self._streamed(settings) if self.is_stream else self._whole(settings)
        self.turns.append((prompt, ids))
        self.ends.append(end)
        self.messages.append(message)
        return message

    def answer(self, *results: str) -> None:
        """Answer the calls of the last message."""
        calls = self.messages[-1]["tool_calls"]
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result} for call, result in zip(calls, results, strict=True)
        ]

    def _whole(self, settings: dict[str, Any]) -> tuple[list[int], list[int], str, Any]:
        reply: Any = self.client.chat.completions.create(**settings)
        choice = reply.choices[0]
        return reply.prompt_token_ids, choice.token_ids, choice.finish_reason, choice.message.model_dump()

    def _streamed(self, settings: dict[str, Any]) -> tuple[list[int], list[int], str, Any]:
        """Add up a stream as the `openai` package itself does."""
        prompt: list[int] = []
        ids: list[int] = []
        with self.client.chat.completions.stream(**settings) as stream:
            for event in stream:
                if event.type == "chunk":
                    chunk: Any = event.chunk
                    prompt += getattr(chunk, "prompt_token_ids", None) or []
                    for choice in chunk.choices:
                        ids += getattr(choice, "token_ids", None) or []
            choice = stream.current_completion_snapshot.choices[0]  # the final one is refused where `max_tokens` cut it
        message = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
        for one in message.get("tool_calls", ()):
            one["function"].pop("parsed_arguments", None)
            one["function"]["arguments"] = json.dumps(json.loads(one["function"]["arguments"]), indent=1)  # written out again
        return prompt, ids, choice.finish_reason, message


@pytest.fixture
def scripted() -> Iterator[Served]:
    """Serve `REPLIES`, one for each number of replies in the prompt."""
    with served(RENDERER, by_turn(REPLIES)) as one:
        yield one


def by_turn(replies: Sequence[Sequence[int]]) -> Callable[[GenerateRequest], Sequence[int]]:
    opening = RENDERER.encode("<|im_start|>assistant\n", add_special_tokens=False).tolist()

    def script(request: GenerateRequest) -> Sequence[int]:
        ids = request.token_ids.tolist()
        return replies[sum(ids[at : at + len(opening)] == opening for at in range(len(ids))) - 1]

    return script


def turns_of(one: Served, history: str) -> float:
    return one.told(f'jaxrl_server_chat_turns_total{{history="{history}"}}')


def client_of(one: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=one.url, api_key="none", max_retries=0, timeout=30)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_that_speaks_openai_plays_five_turns_in_the_very_tokens_that_were_sampled(scripted: Served, is_stream: bool) -> None:
    with client_of(scripted) as client:
        episode = Episode(client, is_stream=is_stream)
        first = episode.ask()
        assert [json.loads(one["function"]["arguments"]) for one in first["tool_calls"]] == [{"a": 3, "b": 4}, {"a": 5, "b": 6}]
        assert (first["content"], first["reasoning_content"]) == ("Adding.", "add them")
        episode.answer("7", "11")
        second = episode.ask()
        assert second["content"] == 'So:\n{"name": "add", "arguments": {"a": 7,' and not second.get("tool_calls")
        episode.messages.append({"role": "user", "content": [{"type": "text", "text": "Again."}]})
        assert episode.ask(max_completion_tokens=len(REPLIES[2]))["content"] == "It is 7 and"
        episode.messages.append({"role": "user", "content": "And together?"})
        fourth = episode.ask()
        assert not fourth.get("content") and fourth["tool_calls"][0]["id"] != first["tool_calls"][0]["id"]
        episode.answer("18")
        assert episode.ask()["content"] == "\U0001f600 18."
    assert episode.ends == ["tool_calls", "stop", "length", "tool_calls", "stop"]
    assert episode.turns == scripted.endpoint.sampled, "what was told is what was sampled"
    assert [ids for _, ids in episode.turns] == REPLIES
    between = [
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n11<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nAnd together?<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n",
    ]
    for (prompt, ids), (following, _), suffix in zip(episode.turns, episode.turns[1:], between, strict=False):
        assert following[: len(prompt) + len(ids)] == prompt + ids
        assert following[len(prompt) + len(ids) :] == RENDERER.encode(suffix, add_special_tokens=False).tolist()
    assert REPLIES[0] != RENDERER.encode(RENDERER.decode(REPLIES[0]), add_special_tokens=False).tolist(), "no tokenizer would write this"
    turns = [turns_of(scripted, what) for what in ("opened", "continued", "forked", "unknown")]
    assert turns == [1, 4, 0, 0]
    assert scripted.told("jaxrl_server_conversations") == scripted.told("jaxrl_server_conversations_remembered_total") == 5


def test_a_stream_tells_calls_apart_from_text_and_ends_in_order(scripted: Served) -> None:
    body = {"model": "tiny", "messages": [QUESTION], "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(scripted.url + "/chat/completions", json=body, timeout=30).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *events, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(REPLIES[0])
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["tool_calls"]
    kinds = [name for delta in deltas[1:-1] for name in delta]
    assert sorted(set(kinds), key=kinds.index) == ["reasoning_content", "content", "tool_calls"]
    assert "".join(delta.get("content", "") for delta in deltas) == "Adding."
    calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert [(one["index"], one["id"], one["function"]["name"]) for one in calls] == [(0, "call_0_0", "add"), (1, "call_0_1", "add")]
    assert {event["object"] for event in events} == {"chat.completion.chunk"} and all(deltas[:-1])


def test_tool_choice_none_leaves_the_prompt_and_tells_calls_as_text(scripted: Served) -> None:
    with client_of(scripted) as client:
        free, bound = Episode(client, is_stream=False), Episode(client, is_stream=False)
        free.ask()
        message = bound.ask(tool_choice="none")
        single = Episode(client, is_stream=True).ask(parallel_tool_calls=False)
    assert free.turns == bound.turns
    assert message["tool_calls"] is None and bound.ends == ["stop"]
    assert message["content"].splitlines() == [
        "Adding.", '{"name": "add", "arguments": {"a": 3, "b": 4}}', '{"name": "add", "arguments": {"a": 5, "b": 6}}',
    ]  # fmt: skip
    assert len(single["tool_calls"]) == 1 and single["content"].endswith('{"name": "add", "arguments": {"a": 5, "b": 6}}')


def test_without_tools_a_chat_leaves_out_the_tags_of_a_call_and_completion_and_detokenize_keep_them(scripted: Served) -> None:
    words = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    with client_of(scripted) as client:
        episode = Episode(client, is_stream=False)
        message = episode.ask(tools=openai.omit)
        (prompt, ids), *_ = episode.turns
        completion = client.completions.create(model="tiny", prompt=prompt, max_tokens=200)
        whole: Any = client.post(scripted.url.removesuffix("/v1") + "/detokenize", body={"tokens": ids}, cast_to=object)
    assert message["tool_calls"] is None
    assert message["content"].splitlines()[1] == '{"name": "add", "arguments": {"a": 3, "b": 4}}'
    assert words in completion.choices[0].text and words in whole["prompt"]


def test_a_call_that_must_be_made_is_refused_with_what_to_do(scripted: Served) -> None:
    with client_of(scripted) as client, pytest.raises(openai.BadRequestError, match="use 'auto', ask for the call in words") as caught:
        Episode(client, is_stream=False).ask(tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_replies_of_one_conversation_that_differ_are_continued_each_in_its_own_tokens() -> None:
    texts = ["eight", "seven", "7"]

    def script(request: GenerateRequest) -> list[int]:
        return [*spelt(texts[request.sampling.seed % 3]), END]

    with served(RENDERER, script) as one, client_of(one) as client:
        reply: Any = client.chat.completions.create(model="tiny", messages=[QUESTION], n=3, seed=0, extra_body=EXACT)
        for index in (2, 0, 1):
            choice = reply.choices[index]
            back = [QUESTION, {"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "Sure?"}]
            then: Any = client.chat.completions.create(model="tiny", messages=back, extra_body=EXACT)
            seen = reply.prompt_token_ids + choice.token_ids
            assert choice.message.content == texts[index] and then.prompt_token_ids[: len(seen)] == seen


def test_of_replies_in_the_same_words_the_newest_is_continued_unless_they_are_salted_apart() -> None:
    spellings = [spelt("an answer"), RENDERER.encode("an answer").tolist()]
    assert spellings[0] != spellings[1]

    def script(request: GenerateRequest) -> list[int]:
        return [*spellings[request.sampling.seed], END]

    with served(RENDERER, script) as one, client_of(one) as client:

        def opened(seed: int, salt: str = "") -> list[int]:
            extra = EXACT | {"cache_salt": salt}
            reply: Any = client.chat.completions.create(model="tiny", messages=[QUESTION], seed=seed, extra_body=extra)
            return reply.prompt_token_ids + reply.choices[0].token_ids

        def goes_on(seen: list[int], salt: str = "") -> bool:
            back = [QUESTION, {"role": "assistant", "content": "an answer"}, QUESTION]
            extra = EXACT | {"cache_salt": salt}
            then: Any = client.chat.completions.create(model="tiny", messages=back, seed=0, extra_body=extra)
            return then.prompt_token_ids[: len(seen)] == seen

        first, second = opened(0), opened(1)
        assert first != second and (goes_on(first), goes_on(second)) == (False, True)
        of_a, of_b = opened(0, "a"), opened(1, "b")
        assert (goes_on(of_a, "a"), goes_on(of_b, "b"), goes_on(second)) == (True, True, True)


def test_parallel_episodes_of_one_conversation_stay_in_their_own_tokens() -> None:
    """Eight agents ask the same question at once and go on at once; each reply has words of its own."""

    def script(request: GenerateRequest) -> list[int]:
        return [*spelt(f"{request.sampling.seed}: {call(request.sampling.seed, 1)}"), END]

    with served(RENDERER, script) as one, client_of(one) as client:

        def play(seed: int) -> Episode:
            episode = Episode(client, is_stream=seed % 2 == 0)
            for _ in range(3):
                episode.ask(seed=seed)
                episode.answer("same")
            return episode

        with ThreadPoolExecutor(8) as pool:
            episodes = list(pool.map(play, range(8)))
        assert turns_of(one, "continued") == 16
    for episode in episodes:
        for (prompt, ids), (following, _) in zip(episode.turns, episode.turns[1:], strict=False):
            assert following[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize(("history", "what"), [("keep", "continued"), ("template", "forked")])
def test_a_template_that_drops_thinking_forks_unless_history_is_kept(history: str, what: str) -> None:
    renderer = renderer_of("qwen3")
    reply = renderer.encode("<think>\nhm\n</think>\n\nSeven.<|im_end|>", add_special_tokens=False).tolist()
    with served(renderer, lambda request: reply, history=history) as one, client_of(one) as client:
        episode = Episode(client, is_stream=False)
        episode.ask()
        episode.messages.append({"role": "user", "content": "Sure?"})
        episode.ask()
        assert turns_of(one, what) == 1
    (prompt, ids), (following, _) = episode.turns
    assert (following[: len(prompt) + len(ids)] == prompt + ids) is (history == "keep")
    assert ("hm" in renderer.decode(following)) is (history == "keep")


def test_what_is_not_remembered_is_rendered_anew(scripted: Served) -> None:
    with client_of(scripted) as client:
        episode = Episode(client, is_stream=False)
        episode.ask()
        episode.answer("7", "11")
        episode.messages[1]["content"] = "I never said that."
        episode.ask()
    (prompt, ids), (following, _) = episode.turns
    assert following[: len(prompt)] == prompt and following[: len(prompt) + len(ids)] != prompt + ids
    assert following == RENDERER.encode(RENDERER.decode(following), add_special_tokens=False).tolist()
    assert turns_of(scripted, "unknown") == 1
    with served(RENDERER, by_turn(REPLIES), max_conversations=0) as forgetful, client_of(forgetful) as client:
        episode = Episode(client, is_stream=False)
        episode.ask()
        episode.answer("7", "11")
        episode.ask()
        assert turns_of(forgetful, "unknown") == 1
        assert forgetful.told("jaxrl_server_conversations") == 0


def test_a_stream_of_several_choices_tells_their_prompt_once(scripted: Served) -> None:
    with client_of(scripted) as client:
        settings: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "n": 3, "extra_body": EXACT}
        whole: Any = client.chat.completions.create(**settings)
        chunks: Any = client.chat.completions.create(**settings, stream=True)
        told = [getattr(chunk, "prompt_token_ids", None) for chunk in chunks]
    assert told[0] == whole.prompt_token_ids and set(map(str, told[1:])) == {"None"}


def test_a_client_that_drops_its_stream_frees_its_place_and_leaves_nothing_behind(scripted: Served) -> None:
    scripted.endpoint.holds = asyncio.Event()  # nothing comes after the first piece
    with client_of(scripted) as client:
        stream = client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[ADD], stream=True)
        next(iter(stream))
        assert scripted.service.num_sequences == 1
        stream.close()
        ends_at = time.monotonic() + 10
        while scripted.service.num_sequences or not scripted.endpoint.num_cancelled:
            assert time.monotonic() < ends_at
            time.sleep(0.005)
    assert scripted.told("jaxrl_server_conversations_remembered_total") == 0
    scripted.endpoint.holds = None
    with client_of(scripted) as client:
        assert Episode(client, is_stream=True).ask()["content"] == "Adding."


def test_tools_beyond_the_body_and_beyond_the_window_are_refused() -> None:
    def tool(size: int) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "description": "x" * size, "x_unknown": {"a": None}}}

    def nested(depth: int) -> str:
        parameters = '{"a": ' + "[" * depth + "]" * depth + "}"
        told = '{"type": "function", "function": {"name": "f", "parameters": ' + parameters + "}}"
        return '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [' + told + "]}"

    with served(RENDERER, by_turn(REPLIES), max_body_bytes=200_000) as one, client_of(one) as client:

        def refused(size: int) -> Any:
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[tool(size)])
            return caught.value

        assert (refused(200_000).status_code, refused(200_000).code) == (413, "body_too_long")
        assert (refused(100_000).status_code, refused(100_000).code) == (400, "context_length_exceeded")
        assert client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[tool(10)]).choices[0].message.content
        for depth in (200, 900, 20_000):
            reply = httpx.post(one.url + "/chat/completions", content=nested(depth), timeout=30)
            assert reply.status_code in (200, 400), reply.text
        assert reply.status_code == 400


def test_a_reply_survives_a_stop_text_of_the_clients() -> None:
    """The tokens go on with the stop text, which the model wrote; the words, and so the client's history, end before it."""
    ids = spelt("Seven.\nUser:")
    with served(RENDERER, lambda request: ids) as one, client_of(one) as client:
        for is_stream in (False, True):
            episode = Episode(client, is_stream=is_stream)
            assert episode.ask(stop=["\nUser:"])["content"] == "Seven."
            episode.messages.append({"role": "user", "content": "Sure?"})
            episode.ask(stop=["\nUser:"])
            (prompt, said), (following, _) = episode.turns
            assert said == ids and following[: len(prompt) + len(ids)] == prompt + ids
    assert threading.active_count() < 20
