"""The endpoint of one server, over real sockets: exact ids, what is tried again and what is not, deadlines, cancelling, the key."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jaxrl.errors import ConfigError, DeadlineError, EndpointDownError, EngineError, PromptTooLongError
from jaxrl.inference.backoff import Backoff
from jaxrl.inference.endpoint import ChatReply, ChatRequest, Endpoint, FinishReason, GenerateRequest, PolicyEndpoint, TokenSampling
from jaxrl.inference.http import HttpEndpoint
from jaxrl.inference.wire import CHAT_PATH, COMPLETIONS_PATH, TOKENS_PATH
from tests.inference.wire_server import MODEL, WINDOW, Answer, Call, FakeModel, Script, WireServer, logprob

QUICK = Backoff(first_s=0.001, longest_s=0.01)
PROMPT = np.array([5, 6, 7], np.int32)


def request(max_tokens: int = 2, prompt: np.ndarray = PROMPT, **fields: Any) -> GenerateRequest:
    return GenerateRequest("r", prompt, TokenSampling(max_tokens=max_tokens), **fields)


@asynccontextmanager
async def served(script: Script, **settings: Any) -> AsyncIterator[tuple[WireServer, HttpEndpoint]]:
    """Run a server and an endpoint that talks to it."""
    async with WireServer(script).running() as server:
        endpoint = HttpEndpoint(server.base_url, **{"model": MODEL, "backoff": QUICK, "timeout_s": 10.0, **settings})
        try:
            yield server, endpoint
        finally:
            await endpoint.close()


async def test_tokens_come_back_as_the_server_sampled_them() -> None:
    async with served(FakeModel()) as (server, endpoint):
        assert isinstance(endpoint, Endpoint)
        generation = await endpoint.generate(request())
    assert generation.token_ids.tolist() == [8, 9]
    np.testing.assert_array_equal(generation.logprobs, np.float32([logprob(8, 3), logprob(9, 4)]))
    assert generation.finish_reason is FinishReason.LENGTH
    assert server.paths() == [TOKENS_PATH] * 2  # the first one finds out that the route is there


async def test_a_server_without_the_token_route_is_asked_for_completions_and_the_choice_is_remembered() -> None:
    async with served(FakeModel(has_tokens_route=False)) as (server, endpoint):
        assert (await endpoint.generate(request())).token_ids.tolist() == [8, 9]
        scores, again = await asyncio.gather(endpoint.score(PROMPT), endpoint.generate(request()))
        assert scores.tolist() == np.float32([0.0, logprob(6, 1), logprob(7, 2)]).tolist()
        assert again.token_ids.tolist() == [8, 9]
    assert server.paths() == [TOKENS_PATH, *[COMPLETIONS_PATH] * 3]


async def test_a_score_is_the_raw_logprob_of_each_token_and_other_temperatures_are_refused() -> None:
    async with served(FakeModel()) as (server, endpoint):
        scores = await endpoint.score(PROMPT)
        np.testing.assert_array_equal(scores, np.float32([0.0, logprob(6, 1), logprob(7, 2)]))
        sent = server.calls[-1].body["sampling_params"]
        assert (sent["max_tokens"], sent["temperature"], sent["prompt_logprobs"]) == (1, 1.0, 0)
        with pytest.raises(EngineError, match="at temperature 1, whatever is asked for"):
            await endpoint.score(PROMPT, temperature=0.7)


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503, {"error": {"message": "loading"}}),
        Answer(429, b"slow down", {"retry-after": "0.01"}),
        Answer(502, b"<html>"),
        Answer(cut_at=0),  # closed without a byte, as uvicorn does to a kept connection after an error
        Answer(200, b"x" * 100, cut_at=60),
    ],
    ids=["503", "429", "502", "reset", "cut"],
)
@pytest.mark.parametrize("what", ["generate", "score"])
async def test_a_busy_server_and_a_lost_connection_are_tried_again(what: str, fault: Answer) -> None:
    model = FakeModel()
    model.faults = [fault, fault]
    async with served(model) as (server, endpoint):
        answer = await (endpoint.generate(request()) if what == "generate" else endpoint.score(PROMPT))
    assert len(answer.token_ids if what == "generate" else answer) > 0
    bodies = [call.body for call in server.calls if call.body]
    assert len(bodies) == 3 and bodies[0] == bodies[1] == bodies[2]  # the same seed: the same reply


async def test_tries_end_and_the_error_names_the_last_failure() -> None:
    model = FakeModel()
    model.faults = [Answer(cut_at=0), *[Answer(503, {"error": {"message": "still loading"}})] * 9]
    async with served(model, max_attempts=3) as (server, endpoint):
        with pytest.raises(EndpointDownError, match=r"'toy' at http://127.*request 'r' failed 3 times, .* status 503: still loading"):
            await endpoint.generate(request())
    assert len(server.paths()) == 1 + 3


async def test_a_server_that_wants_more_patience_than_the_deadline_has_is_given_up_at_once() -> None:
    model = FakeModel()
    model.faults = [Answer(503, b"maintenance", {"retry-after": "3600"})]
    async with served(model) as (_, endpoint), asyncio.timeout(5):
        with pytest.raises(EndpointDownError, match="maintenance"):
            await endpoint.generate(request())


async def test_a_server_that_is_not_there_is_down() -> None:
    async with served(FakeModel()) as (server, endpoint):
        pass
    endpoint = HttpEndpoint(server.base_url, MODEL, backoff=QUICK, max_attempts=2)
    with pytest.raises(EndpointDownError, match="failed 2 times, the last time with ConnectError"):
        await endpoint.score(PROMPT)
    health = await endpoint.health()
    assert not health.is_ready and "cannot be reached" in health.problem
    await endpoint.close()


async def test_a_server_that_accepts_and_never_answers_ends_with_the_name_of_the_call() -> None:
    model = FakeModel()
    async with served(model, timeout_s=0.5) as (server, endpoint):
        await endpoint.score(PROMPT)
        model.wait_s = 30.0
        with pytest.raises(DeadlineError, match=r"score of 3 tokens got no answer within 0.5 s \(`timeout_s`\)"):
            await endpoint.score(PROMPT)
        await until(lambda: server.num_closed_early == 1)


async def test_cancelling_a_call_closes_its_connection() -> None:
    model = FakeModel()
    model.wait_s = 30.0
    async with served(model) as (server, endpoint):
        task = asyncio.create_task(endpoint.generate(request()))
        await until(lambda: server.num_waiting == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.num_closed_early == 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (Answer(400, {"error": {"message": "maximum context length is 64 tokens"}}), PromptTooLongError, "maximum context length"),
        (Answer(400, {"error": {"message": "Token id 999 is out of vocabulary"}}), EngineError, "status 400: Token id 999"),
        (Answer(422, {"detail": [{"loc": ["seed"]}]}), EngineError, r"status 422: \[\{.loc"),
        (Answer(500, b"Internal Server Error"), EngineError, "status 500: Internal Server Error"),
        (
            Answer(307, b"", {"location": "http://elsewhere/"}),
            EngineError,
            "status 307: it redirects to 'http://elsewhere/'.*correct `base_url`",
        ),
        (Answer(404, {"error": {"message": "gone"}}), EngineError, "404 from /inference/v1/generate, though the model is served: gone"),
        (Answer(200, b"<html>"), EngineError, "'toy' at http.*: request 'r': the server's answer is not JSON"),
    ],
)
async def test_what_the_server_refuses_is_not_tried_again(answer: Answer, error: type[Exception], said: str) -> None:
    model = FakeModel()
    model.faults = [answer]
    async with served(model) as (server, endpoint):
        with pytest.raises(error, match=said) as caught:
            await endpoint.generate(request())
        assert type(caught.value) is error
        assert len(server.paths()) == 2


async def test_an_endless_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.inference.http.MAX_ANSWER_BYTES", 1000)
    model = FakeModel()
    async with served(model) as (_, endpoint):
        model.faults = [Answer(200, gzip.compress(b" " * 10**6), {"content-encoding": "gzip"})]
        with pytest.raises(EngineError, match="answered with more than 1000 bytes"):
            await endpoint.generate(request())
        model.faults = [Answer(200, b"no gzip", {"content-encoding": "gzip"})]
        with pytest.raises(EngineError, match="DecodingError"):
            await endpoint.generate(request())
        assert (await endpoint.generate(request())).token_ids.tolist() == [8, 9]


async def test_a_model_that_is_not_served_is_named_beside_those_that_are() -> None:
    async with served(FakeModel(models=("small", "large")), model="medium") as (_, endpoint):
        with pytest.raises(EngineError, match="does not serve 'medium'; it serves 'small', 'large'"):
            await endpoint.generate(request())
        health = await endpoint.health()
    assert not health.is_ready and "it serves 'small', 'large'" in health.problem


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "wants a key .*name the variable that holds it in `api_key_var`"),
        ({"api_key": "sesame-wrong", "api_key_var": "TEACHER_KEY"}, "refused the key in the environment variable TEACHER_KEY"),
    ],
)
async def test_a_key_that_is_missing_or_wrong_is_named_by_its_variable_and_never_shown(settings: dict[str, str], said: str) -> None:
    async with served(FakeModel(key="sesame"), **settings) as (_, endpoint):
        with pytest.raises(EngineError, match=said) as caught:
            await endpoint.score(PROMPT)
        assert "sesame" not in f"{caught.value}{caught.value.__cause__!r}{endpoint!r}{vars(endpoint)['_client']!r}"
        assert not (await endpoint.health()).is_ready


@pytest.mark.parametrize("key", ["sesame\nopen", "sesäme", "sesame\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="in the environment variable TEACHER_KEY holds a character") as caught:
        HttpEndpoint("http://127.0.0.1:1/v1", MODEL, api_key=key, api_key_var="TEACHER_KEY")
    assert key[:3] not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(400, {"error": {"message": "you sent sesame-open"}}),
        Answer(302, b"", {"location": "http://elsewhere/sesame-open"}),
        Answer(200, {"choices": "sesame-open"}),
    ],
    ids=["refusal", "redirect", "answer"],
)
async def test_a_key_that_the_server_repeats_is_cut_out(answer: Answer) -> None:
    model = FakeModel(key="sesame-open")
    model.faults = [answer]
    async with served(model, api_key="sesame-open") as (_, endpoint):
        with pytest.raises(EngineError, match="<redacted>"):
            await endpoint.score(PROMPT)
        assert (await endpoint.health()).is_ready


async def test_the_window_that_the_server_tells_cuts_replies_and_refuses_prompts() -> None:
    async with served(FakeModel()) as (server, endpoint):
        assert (await endpoint.health()).detail == {"window": float(WINDOW)}
        long = np.arange(WINDOW - 3, dtype=np.int32)
        assert len((await endpoint.generate(request(50, long))).token_ids) == 3
        num_calls = len(server.calls)
        with pytest.raises(PromptTooLongError, match="64 prompt tokens leave no room in a window of 64"):
            await endpoint.generate(request(1, np.arange(WINDOW, dtype=np.int32)))
        assert len(server.calls) == num_calls


async def test_health_asks_for_the_server_and_for_the_model_and_a_server_without_the_route_is_well() -> None:
    model = FakeModel()

    def no_health(call: Call) -> Answer:
        return Answer(404, b"") if call.path == "/health" else model(call)

    async with served(model) as (_, endpoint):
        assert (await endpoint.health()).is_ready
        model.is_well = False
        health = await endpoint.health()
        assert not health.is_ready and "is not well: status 503" in health.problem
    async with served(no_health) as (_, endpoint):
        assert (await endpoint.health()).is_ready


async def test_a_frozen_endpoint_takes_no_weights_and_no_alternatives() -> None:
    endpoint = HttpEndpoint("http://127.0.0.1:1/v1", MODEL)
    assert not isinstance(endpoint, PolicyEndpoint)
    with pytest.raises(EngineError, match="num_top_logprobs"):
        await endpoint.generate(request(num_top_logprobs=2))
    await endpoint.close()


async def test_a_chat_goes_to_the_chat_route_and_failures_are_those_of_any_other_call() -> None:
    model = FakeModel(has_tokens_route=False)
    chat = ChatRequest("r", ({"role": "user", "content": "hi"},), TokenSampling(max_tokens=3))
    async with served(model) as (server, endpoint):
        assert await endpoint.chat(chat) == ChatReply("HI", is_stopped=True)
        assert server.paths() == [CHAT_PATH]
        model.faults = [Answer(503, {"error": "busy"}), Answer(400, {"error": {"message": "maximum context length is 64"}})]
        with pytest.raises(PromptTooLongError, match="maximum context length"):
            await endpoint.chat(chat)
        model.change = lambda answer: answer["choices"][0].pop("message")
        with pytest.raises(EngineError, match=rf"'{MODEL}' at http.*request 'r': the server answered with the message None"):
            await endpoint.chat(chat)


async def test_a_server_of_openais_settings_alone_is_asked_without_the_others_from_then_on() -> None:
    model = FakeModel()
    model.faults = [Answer(400, {"error": {"message": "Unrecognized request argument supplied: top_k"}})]
    chat = ChatRequest("r", ({"role": "user", "content": "hi"},), TokenSampling(max_tokens=3))
    async with served(model) as (server, endpoint):
        for _ in range(2):
            assert await endpoint.chat(chat) == ChatReply("HI", is_stopped=True)
        assert ["top_k" in call.body for call in server.calls if call.method == "POST"] == [True, False, False]
