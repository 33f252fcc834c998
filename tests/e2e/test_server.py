"""A real server on a loopback port, asked by the `openai` client, by ours, and by clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxrl import eval as evaluation
from jaxrl.batching import rollout_to_samples
from jaxrl.config.algorithm import OPDConfig, OPSDConfig
from jaxrl.config.env import SamplingConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.config.serve import ServeConfig, ServedModelConfig, ServerConfig
from jaxrl.engine import Engine
from jaxrl.engine.server import Service
from jaxrl.errors import PromptTooLongError
from jaxrl.evals import EvalResult
from jaxrl.inference.endpoint import GenerateRequest, Generation, TokenSampling
from jaxrl.inference.frozen import FrozenPool
from jaxrl.inference.http import HttpEndpoint
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.wire import COMPLETIONS_PATH, TOKENS_PATH
from jaxrl.launch.serving import Running, serve
from jaxrl.losses import token_scores
from jaxrl.models import load_pretrained
from jaxrl.monitors.jsonl import read_lines
from jaxrl.orchestrator.algo import OPD, OPSD, AlgorithmContext
from jaxrl.orchestrator.sources import FrozenSource
from jaxrl.trainer.compiles import num_compiles
from jaxrl.types import Rollout, Task
from jaxrl.weights import WeightStore
from tests.builders import make_node, make_rollout
from tests.e2e.runs import ROOT
from tests.engine.tiny import generate

MODEL, KEY, KEY_VAR = str(ROOT / "configs/quickstart/start_model"), "sesame-0123456789", "JAXRL_TEST_KEY"
ENGINE = EmbeddedInferenceConfig(num_slots=16, max_model_len=48, prefill_rows=4, min_prefill_bucket=48)
QUESTION = [{"role": "user", "content": "8 + 3 - 1 + 8 ="}]


def config(**server: Any) -> ServeConfig:
    settings = {"port": 0, "api_key_var": KEY_VAR, "max_queue": 64, "max_body_bytes": 20_000} | server
    return ServeConfig(model=ServedModelConfig(name=MODEL, served_name="small"), inference=ENGINE, server=ServerConfig(**settings))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Run `serve` in a thread, and stop it as Ctrl-C would."""
    ready: Future[Running] = Future()
    said: list[str] = []

    def run() -> None:
        try:
            serve(config(), said.append, ready.set_result)
        except BaseException as error:
            ready.set_exception(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VAR, KEY)
        thread = threading.Thread(target=run)
        thread.start()
        running = ready.result(timeout=100)
        yield running
        running.request_stop()
        thread.join(timeout=20)
    assert not thread.is_alive()
    assert any(line.startswith("serving 'small' at http://127.0.0.1:") for line in said)
    assert next(line for line in said if line.startswith("compiling")).startswith("compiling decode (1 of "), "named when it begins"
    assert KEY not in "".join(said)


@pytest.fixture(scope="module")
def reference(server: Running) -> Engine:
    """Return an engine of the same model as training builds it, ticked by the test."""
    model, params = load_pretrained(MODEL)
    store = WeightStore(model.spec, "float32")
    store.publish(0, params)
    return Engine(model.spec, store.get(0), ENGINE, version=0, decode_text=server.backend.renderer.decode)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_slot_is_leaked(server: Running) -> Iterator[None]:
    yield
    wait_for(server, running=0, waiting=0, sequences=0)


def wait_for(server: Running, **expected: int) -> None:
    """Wait until the engine's and the server's own counts are as expected."""
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at:
        stats = server.backend.engine.stats() | {"sequences": server.service.num_sequences}
        if all(stats[name] == value for name, value in expected.items()):
            return
        time.sleep(0.005)
    raise AssertionError(f"expected {expected}, still {stats}")


def in_process(engine: Engine, prompt: np.ndarray, stop_ids: tuple[int, ...], **settings: Any) -> Generation:
    return generate(engine, GenerateRequest("r", prompt, TokenSampling(stop_ids=stop_ids, **settings)))[0]


def root_of(server: Running) -> str:
    return server.url.removesuffix("/v1")


def post(server: Running, body: Any, path: str = "/v1/completions", key: str | None = KEY) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(root_of(server) + path, content=content, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60)


@contextlib.contextmanager
def paused(server: Running) -> Iterator[None]:
    """Hold the engine: requests stay where they are."""
    engine = server.backend.engine

    def settle(change: Future[None]) -> None:
        server.device.wake()
        change.result(timeout=5)

    settle(engine.pause())
    try:
        yield
    finally:
        settle(engine.resume())


# What the in-process engine says


def test_a_completion_is_what_the_in_process_engine_says(server: Running, client: openai.OpenAI, reference: Engine) -> None:
    renderer = server.backend.renderer
    prompt = renderer.encode("8 + 3 =")
    expected = in_process(reference, prompt, renderer.stop_ids, max_tokens=12, temperature=0.0)
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    for given in ("8 + 3 =", prompt.tolist(), [prompt.tolist()]):
        reply: Any = client.completions.create(
            model="small", prompt=given, max_tokens=12, temperature=0, logprobs=3, extra_body=extra
        )
        choice = reply.choices[0]
        assert choice.token_ids == expected.token_ids.tolist()
        assert choice.prompt_token_ids == prompt.tolist()
        assert choice.text == renderer.reply_text(expected.token_ids)
        assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]
        np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.logprobs, rtol=0, atol=1e-5)
        for token, logprob, tops in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
            assert max(tops, key=tops.get) == token and tops[token] == logprob and len(tops) == 3
        assert reply.usage.total_tokens == len(prompt) + len(expected.token_ids)


def test_a_chat_is_what_the_in_process_engine_says(server: Running, client: openai.OpenAI, reference: Engine) -> None:
    renderer = server.backend.renderer
    turn = renderer.open_turn(None, QUESTION)
    for seed, temperature in ((0, 0.0), (5, 0.7)):
        expected = in_process(reference, turn.prompt_ids, renderer.stop_ids, max_tokens=32, temperature=temperature, seed=seed)
        reply: Any = client.chat.completions.create(
            model="small", messages=QUESTION, temperature=temperature, seed=seed, logprobs=True, top_logprobs=2,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        choice = reply.choices[0]
        assert (reply.prompt_token_ids, choice.token_ids) == (turn.prompt_ids.tolist(), expected.token_ids.tolist())
        assert choice.message.content == renderer.reply_text(expected.token_ids)
        assert choice.finish_reason == str(expected.finish_reason)
        np.testing.assert_allclose([part.logprob for part in choice.logprobs.content], expected.logprobs, rtol=0, atol=1e-5)
        assert [part.token for part in choice.logprobs.content] == [renderer.decode([i]) for i in choice.token_ids]


def test_a_stream_adds_up_to_the_reply(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "stop": ["+", "1"]}
    whole: Any = client.chat.completions.create(model="small", messages=QUESTION, logprobs=True, **settings)
    texts, logprobs, ends, usage = ["", ""], [[], []], ["", ""], None
    for chunk in client.chat.completions.create(
        model="small", messages=QUESTION, logprobs=True, stream=True, stream_options={"include_usage": True}, **settings
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += [part.logprob for part in choice.logprobs.content] if choice.logprobs else []
            ends[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [[part.logprob for part in choice.logprobs.content] for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(model="small", prompt="8 +", seed=1, stream=True))
    assert text == client.completions.create(model="small", prompt="8 +", seed=1).choices[0].text


def test_choice_i_is_the_reply_to_seed_plus_i(client: openai.OpenAI) -> None:
    together = client.completions.create(model="small", prompt=["8 +", "1 -"], n=3, seed=5, max_tokens=10)
    alone = [client.completions.create(model="small", prompt=p, seed=s, max_tokens=10) for p in ("8 +", "1 -") for s in (5, 6, 7)]
    assert [choice.text for choice in together.choices] == [reply.choices[0].text for reply in alone]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert len({choice.text for choice in together.choices}) > 1
    unseeded: Any = client.completions.create(model="small", prompt="8 +", max_tokens=10)
    again = client.completions.create(model="small", prompt="8 +", max_tokens=10, seed=unseeded.seed)
    assert again.choices[0].text == unseeded.choices[0].text, "a reply says which seed gives it again"


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_after_it(server: Running, client: openai.OpenAI) -> None:
    def ask(stop: list[str] | None = None, **extra: Any) -> Any:
        settings: dict[str, Any] = {"model": "small", "prompt": "8 + 3 =", "max_tokens": 12, "temperature": 0, "logprobs": 0}
        return client.completions.create(**settings, stop=stop, extra_body={"return_token_ids": True} | extra)

    free = ask()
    text, token_ids = free.choices[0].text, free.choices[0].token_ids
    stop = text[3:5]
    choice = ask(["never", stop]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert choice.token_ids == token_ids[: len(choice.token_ids)] and len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    decode = server.backend.renderer.decode
    assert stop in decode(choice.token_ids) and stop not in decode(choice.token_ids[:-1])
    by_id = ask(stop_token_ids=[token_ids[2]])
    first = token_ids.index(token_ids[2])
    assert (by_id.choices[0].stop_reason, by_id.choices[0].token_ids) == (token_ids[2], token_ids[: first + 1])
    assert by_id.choices[0].text == server.backend.renderer.decode(token_ids[:first])


def test_prompt_logprobs_are_the_scores_of_the_prompt(server: Running, client: openai.OpenAI, reference: Engine) -> None:
    prompt = server.backend.renderer.encode("8 + 3 = 11")
    future = reference.score(prompt)
    reference.tick()
    expected = future.result(timeout=0)
    reply: Any = client.completions.create(model="small", prompt=prompt.tolist(), max_tokens=1, extra_body={"prompt_logprobs": 2})
    rows = reply.choices[0].prompt_logprobs
    assert rows[0] is None and len(rows) == len(prompt)
    for token_id, row, logprob in zip(prompt.tolist()[1:], rows[1:], expected[1:], strict=True):
        assert abs(row[str(token_id)]["logprob"] - logprob) < 1e-5
        by_rank = sorted(row.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in by_rank] == sorted((entry["logprob"] for entry in by_rank), reverse=True)
        assert [entry["rank"] for entry in by_rank[:2]] == [1, 2] and len(row) in (2, 3)
        assert row[str(token_id)]["decoded_token"] == server.backend.renderer.decode([token_id])


def test_tokens_in_tokens_out_tells_which_version_sampled_each(server: Running) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 2, "prompt_logprobs": 0}}
    reply = post(server, body | {"request_id": "jx-1", "cache_salt": "v0"}, "/inference/v1/generate").json()
    choice = reply["choices"][0]
    assert reply["request_id"] == "generate-tokens-jx-1" and len(reply["prompt_logprobs"]) == 3
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    content = choice["logprobs"]["content"]
    assert [part["token_id"] for part in content] == choice["token_ids"]
    for part in content:
        assert part["top_logprobs"][0] == {"token_id": part["token_id"], "logprob": part["logprob"], "rank": 1}


async def test_our_own_client_gets_the_same_tokens_logprobs_and_scores(server: Running, reference: Engine) -> None:
    renderer = server.backend.renderer
    prompt = renderer.encode("8 + 3 =")
    sampling = TokenSampling(max_tokens=12, temperature=0.8, seed=9, stop_ids=renderer.stop_ids)
    (expected,) = generate(reference, GenerateRequest("r", prompt, sampling))
    endpoint = HttpEndpoint(server.url, "small", api_key=KEY)
    try:
        assert (await endpoint.health()).is_ready
        came = await endpoint.generate(GenerateRequest("r", prompt, sampling))
        future = reference.score(prompt)
        reference.tick()
        np.testing.assert_allclose(await endpoint.score(prompt), future.result(timeout=0), rtol=0, atol=1e-5)
    finally:
        await endpoint.close()
    assert (came.token_ids.tolist(), came.finish_reason) == (expected.token_ids.tolist(), expected.finish_reason)
    np.testing.assert_allclose(came.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", [TOKENS_PATH, COMPLETIONS_PATH])
async def test_a_frozen_pool_gets_by_either_route_what_the_engine_gives(server: Running, reference: Engine, path: str) -> None:
    prompt = server.backend.renderer.encode("8 + 3 =")
    request = GenerateRequest("r", prompt, TokenSampling(max_tokens=12, temperature=0.0, stop_ids=server.backend.renderer.stop_ids))
    (expected,) = generate(reference, request)
    future = reference.score(prompt)
    reference.tick()
    endpoint = HttpEndpoint(server.url, "small", api_key=KEY)
    endpoint._path = path
    with pytest.raises(PromptTooLongError, match="leaves no room"):  # said by the server: the window is not known yet
        await endpoint.generate(GenerateRequest("long", np.ones(ENGINE.max_model_len, np.int32), TokenSampling(max_tokens=1)))
    pool = FrozenPool("small", {server.url: endpoint})
    try:
        await pool.setup(window=ENGINE.max_model_len - 1, scored_ids=prompt)
        assert pool.window == ENGINE.max_model_len
        for came in await asyncio.gather(*(pool.generate(request) for _ in range(4))):
            assert (came.token_ids.tolist(), came.finish_reason) == (expected.token_ids.tolist(), expected.finish_reason)
            np.testing.assert_allclose(came.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(await pool.score(prompt), future.result(timeout=0), rtol=0, atol=1e-5)
    finally:
        await pool.close()


def in_turn(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    """Return the scores of a sequence by an engine that the test ticks."""
    future = engine.score(token_ids)
    while not future.done():
        engine.tick()
    return future.result(timeout=0)


def by_trainer(sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Return what the trainer's forward pass says of sequences that are packed into one row, at temperature 1."""
    row = np.zeros((1, ENGINE.max_model_len * 2), np.int32)
    segments, positions = row.copy(), row.copy()
    ends = np.cumsum([len(ids) for ids in sequences])
    for index, (ids, end) in enumerate(zip(sequences, ends, strict=True)):
        at = slice(end - len(ids), end)
        row[0, at], segments[0, at], positions[0, at] = ids, index + 1, np.arange(len(ids))
    return np.split(np.asarray(trainer_scores()(row, positions, segments)), ends)[:-1]


@functools.cache
def trainer_scores() -> Callable[..., jax.Array]:
    model, params = load_pretrained(MODEL)

    @jax.jit
    def scores(row: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        hidden = model.hidden(params, row, positions, segments)
        return token_scores(hidden, model.head(params), row, segments, jnp.ones(row.shape), chunk_tokens=32).logprobs[0]

    return scores


def played(server: Running) -> Rollout:
    """Return a rollout of two branches in the model's own words."""
    encode = functools.partial(server.backend.renderer.encode, add_special_tokens=False)
    rollout = make_rollout(1.0, turns=((encode("8 + 3 =").tolist(), encode(" 11").tolist()),), with_samples=False)
    rollout.nodes.append(make_node(0, encode(" 12, no").tolist(), num_sampled=3))
    rollout.samples = rollout_to_samples(rollout)
    return rollout


async def test_a_teacher_that_we_serve_says_what_the_trainer_itself_would(server: Running, reference: Engine, caplog: Any) -> None:
    teacher = FrozenModelConfig(name="small", base_url=[server.url], api_key_var=KEY_VAR)
    context = AlgorithmContext("sums", server.backend.renderer, window=ENGINE.max_model_len - 1)
    algorithm, rollout = OPD(OPDConfig(teacher=teacher), PolicyPool([server.backend.endpoint], 0), context), played(server)
    try:
        await algorithm.setup()
        assert [record for record in caplog.records if record.name.startswith("jaxrl")] == []  # its vocabulary was compared
        await algorithm.finalize_rollout(rollout)
        alone = [await algorithm.teacher.score(sample.token_ids) for sample in reversed(rollout.samples)]
    finally:
        for pool in algorithm.connected_pools:
            await pool.close()
    assert len(rollout.samples) == 2
    for sample, again, trained in zip(rollout.samples, reversed(alone), by_trainer([s.token_ids for s in rollout.samples]), strict=True):
        np.testing.assert_array_equal(sample.ref_logprobs, again)
        np.testing.assert_allclose(sample.ref_logprobs, in_turn(reference, sample.token_ids), rtol=0, atol=1e-5)
        np.testing.assert_allclose(sample.ref_logprobs, trained, rtol=0, atol=1e-5)


async def test_a_policy_that_teaches_itself_says_what_the_trainer_would_of_hint_and_rollout(server: Running) -> None:
    context = AlgorithmContext("sums", server.backend.renderer, window=ENGINE.max_model_len, demonstration=lambda spec: "11")
    config = OPSDConfig(template="{demonstration}")
    algorithm, rollout = OPSD(config, PolicyPool([server.backend.endpoint], 7), context), played(server)
    await algorithm.setup()
    await algorithm.finalize_rollout(rollout)
    hint = algorithm.hint_ids("11")
    expected = by_trainer([np.concatenate([hint, sample.token_ids]) for sample in rollout.samples])
    for sample, scores in zip(rollout.samples, expected, strict=True):
        np.testing.assert_allclose(sample.ref_logprobs, scores[len(hint) :], rtol=0, atol=1e-5)
    assert rollout.metrics["ref_version"] == 7.0


def test_the_tokenizer_is_shown_and_wants_the_key(server: Running) -> None:
    ids = server.backend.renderer.encode("8 + 3").tolist()
    shown = post(server, {"model": "small", "prompt": "8 + 3"}, "/tokenize")
    assert (shown.status_code, shown.json()["tokens"], shown.json()["max_model_len"]) == (200, ids, 48)
    assert post(server, {"tokens": ids}, "/detokenize").json() == {"prompt": "8 + 3"}
    assert post(server, {"tokens": [10**6]}, "/detokenize").json()["error"]["param"] == "tokens"
    assert {post(server, {}, path, key=None).status_code for path in ("/tokenize", "/detokenize")} == {401}
    assert httpx.get(root_of(server) + "/tokenize", headers={"Authorization": f"Bearer {KEY}"}).status_code == 405


async def test_a_source_of_rollouts_gets_the_same_in_tokens_and_in_words(server: Running) -> None:
    played: list[Rollout] = []
    for why_in_words in (None, "as if its vocabulary were another"):
        source = FrozenSource(
            FrozenModelConfig(name="small", base_url=[server.url], api_key_var=KEY_VAR),
            server.backend.renderer,
            SamplingConfig(temperature=0.0, max_tokens=12),
            run_seed=0,
            window=48,
        )
        try:
            await source.setup()
            assert source.why_in_words is None, "the server tells what its ids stand for"
            source.why_in_words = why_in_words
            rollout = Rollout(Task("toy", "t", {}), "toy/0", member=0, draw_index=0)
            await source.open_session(rollout).ask(QUESTION)
            played.append(rollout)
        finally:
            for pool in source.connected_pools:
                await pool.close()
    for tokens, words in zip(*(rollout.nodes for rollout in played), strict=True):
        assert (tokens.content, tokens.finish_reason, tokens.num_sampled) == (words.content, words.finish_reason, words.num_sampled)
        assert tokens.token_ids.tolist() == words.token_ids.tolist()
    assert played[0].nodes[-1].num_sampled > 1


# Many, and those that misbehave


async def test_64_concurrent_requests_get_their_own_answers_and_nothing_compiles(server: Running) -> None:
    before = num_compiles()
    async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        def ask(i: int) -> Any:
            return client.completions.create(model="small", prompt=f"{i % 10} + {i // 10} =", max_tokens=8, seed=i, logprobs=i % 2)

        together = await asyncio.gather(*(ask(i) for i in range(64)))
        alone = [await ask(i) for i in (0, 17, 42, 63)]
    assert [together[i].choices[0].text for i in (0, 17, 42, 63)] == [reply.choices[0].text for reply in alone]
    assert len({reply.choices[0].text for reply in together}) > 10
    assert num_compiles() == before


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots(server: Running, is_stream: bool) -> None:
    with paused(server):
        body = json.dumps({"model": "small", "prompt": [[5], [6]], "max_tokens": 40, "n": 2, "stream": is_stream}).encode()
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_for(server, sequences=4, waiting=4)
        wait_for(server, sequences=0, waiting=0)


def test_a_client_that_hangs_up_in_mid_stream_frees_its_slot(server: Running, client: openai.OpenAI) -> None:
    before = server.backend.engine.stats()["generated_tokens"]
    stream = client.completions.create(model="small", prompt=[5], max_tokens=47, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    with paused(server):
        stream.close()
        wait_for(server, sequences=0, running=0)
    assert server.backend.engine.stats()["generated_tokens"] - before < 47


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        with paused(server):
            waiting = pool.submit(post, server, {"prompt": "8 +", "n": 80, "max_tokens": 1})  # 16 slots and a queue of 64
            wait_for(server, sequences=80)
            refused = post(server, {"prompt": "8 +"})
        assert waiting.result().status_code == 200
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "queue_full"
    never = post(server, {"prompt": "8 +", "n": 81})
    assert never.status_code == 400 and "81 sequences" in never.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        ({"prompt": [5] * 48}, 400, "context_length_exceeded"),
        ({"prompt": [5, 512]}, 400, "bad_request"),
        ({"prompt": "x", "tools": [1]}, 400, "unsupported_parameter"),
        ({"prompt": "x", "model": "gpt-5"}, 404, "model_not_found"),
        ({"prompt": "x" * 20_000}, 413, "body_too_long"),
    ],
    ids=["garbage", "oversized prompt", "foreign id", "unsupported", "unknown model", "long body"],
)
def test_a_bad_request_has_its_status_and_openais_shape(server: Running, body: Any, status: int, code: str) -> None:
    for path in ("/v1/completions", *(["/inference/v1/generate"] if status == 413 else [])):
        reply = post(server, body, path)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


def test_a_body_without_a_length_is_counted_as_it_comes(server: Running) -> None:
    parts = (b"x" * 4096 for _ in range(6))
    reply = httpx.post(server.url + "/completions", content=parts, headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 413


def test_the_openai_client_raises_its_own_exceptions(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="48 tokens, which leaves no room"):
        client.completions.create(model="small", prompt=[5] * 48)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5' here; this server has 'small'"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["small"] and client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_every_route_but_health_wants_the_key(server: Running) -> None:
    root = root_of(server)
    assert httpx.get(root + "/health").json() == {"status": "ready", "version": 0, "running": 0, "waiting": 0}
    for key in (None, "wrong", KEY + "x", "sésame"):
        headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
        replies = [httpx.get(root + path, headers=headers) for path in ("/v1/models", "/metrics", "/nowhere")]
        replies.append(httpx.post(root + "/v1/completions", headers=headers, content=b"{"))
        assert {reply.status_code for reply in replies} == {401}, key
        assert replies[0].json()["error"]["code"] == "invalid_api_key" and replies[0].headers["www-authenticate"] == "Bearer"


def test_unknown_routes_and_methods_are_refused_in_the_same_shape(server: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    nowhere = httpx.get(root_of(server) + "/v1/nowhere", headers=headers)
    wrong = httpx.get(server.url + "/completions", headers=headers)
    assert (nowhere.status_code, nowhere.json()["error"]["message"]) == (404, "there is no route /v1/nowhere")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_the_example_of_the_document_runs(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    code = text.split("```py\n")[1].split("```")[0]
    exec(code.replace("http://127.0.0.1:8000/v1", server.url).replace('"none"', repr(KEY)), {})
    assert len(capsys.readouterr().out) > 20


def test_metrics_are_prometheus_text(server: Running, client: openai.OpenAI) -> None:
    client.completions.create(model="small", prompt="8 +", max_tokens=1)
    text = httpx.get(root_of(server) + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["jaxrl_engine_running"]) == 0 and float(lines["jaxrl_engine_generated_tokens_total"]) >= 1
    assert int(lines['jaxrl_server_replies_total{route="/v1/completions",status="200"}']) >= 1


# Other configurations over the same model


def over(server: Running, settings: ServeConfig, *, is_ready: bool = True) -> httpx.AsyncClient:
    service = Service(settings)
    if is_ready:
        service.attach(server.backend)
    return httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://server")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_past_its_deadline_is_cancelled_and_answered(server: Running, is_stream: bool) -> None:
    with paused(server):
        async with over(server, config(request_deadline_s=0.1)) as client:
            reply = await client.post("/v1/completions", json={"prompt": "8 +", "stream": is_stream})
    error = json.loads(reply.text.removeprefix("data: "))["error"]
    assert (reply.status_code, error["code"]) == (200 if is_stream else 504, "deadline_exceeded")
    assert "within 0.1 s (`server.request_deadline_s`)" in error["message"]


async def test_a_server_that_is_loading_says_so(server: Running) -> None:
    async with over(server, config(), is_ready=False) as client:
        health, reply = await client.get("/health"), await client.post("/v1/completions", json={"prompt": "x"})
    assert (health.status_code, health.json()) == (503, {"status": "loading", "detail": "starting"})
    assert (reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]) == (503, "not_ready", "1")


def test_a_checkpoint_and_its_server_are_measured_alike_at_temperature_0(server: Running, tmp_path: Path) -> None:
    """`jaxrl eval` in process and over HTTP: the same prompts, so the same texts, tokens and outcomes."""
    asked = ["reasoning_gym:chain_sum@2x1,3x1", "--env.num_tasks=100", "--limit=12", "--max-tokens=16", "--json"]
    engine = [f"--inference.{key}={value}" for key, value in ENGINE.model_dump(exclude={"type"}).items()]
    who = {
        "own": ["--checkpoint", MODEL, *engine],
        "served": ["--llm-endpoint", server.url, "--model", "small", "--api-key-var", KEY_VAR],
    }
    for name, flags in who.items():
        assert evaluation.main([*asked, *flags, f"--output-dir={tmp_path / name}"]) == 0
    own, served = (read_lines(tmp_path / name / "episodes.jsonl") for name in who)
    same = ("episode_id", "text", "reward", "completion_tokens", "turns", "finish_reason", "is_truncated", "observation_sha", "status")
    assert [[row[key] for key in same] for row in own] == [[row[key] for key in same] for row in served]
    assert len(own) == 12 and len({row["text"] for row in own}) > 6 and {row["reward"] for row in own} == {0.0, 1.0}
    assert any("<think>" in row["text"] for row in own), "the server had set the thinking apart"
    assert all(row["completion_tokens"] for row in served)
    own_scores, served_scores = (EvalResult.from_json(tmp_path / name / "result.json").scores for name in who)
    assert own_scores["per_task"] == served_scores["per_task"] and own_scores["reproducible"] is True
