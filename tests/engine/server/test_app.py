"""The service over a tiny engine that fails: statuses, and no place that stays taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.serve import ServeConfig, ServedModelConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine import EmbeddedEndpoint
from jaxrl.engine.server import Backend, Service
from jaxrl.inference.rendering import Renderer
from jaxrl.weights import WeightStore
from tests.engine.tiny import SPEC, decode_params, make_engine

RENDERER = Renderer.from_pretrained(Path(__file__).parents[2] / "golden" / "tokenizer")
GENERATE = "/inference/v1/generate"


class Served:
    """A tiny engine with its thread, behind a service."""

    def __init__(self, decode_text: Callable[[list[int]], str]) -> None:
        self.engine = make_engine(decode_text=decode_text)
        self.device = DeviceThread("test")
        self.device.start()
        self.device.attach_engine(self.engine.has_work, self.engine.tick)
        endpoint = EmbeddedEndpoint(self.engine, self.device, WeightStore(SPEC, "float32"))
        inference = EmbeddedInferenceConfig(num_slots=8, max_model_len=32)
        self.service = Service(ServeConfig(model=ServedModelConfig(name="tiny"), inference=inference))
        self.service.attach(Backend(self.engine, endpoint, RENDERER))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.service), base_url="http://server")

    async def ask(self, **params: Any) -> httpx.Response:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "ignore_eos": True, "n": 3} | params}
        return await self.client.post(GENERATE, json=body)


def explode(token_ids: list[int]) -> str:
    raise RuntimeError("no such id")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served(explode)
    yield server
    await server.client.aclose()
    assert server.service.num_sequences == 0
    server.service.close()
    server.device.stop(5.0)


async def test_a_failed_engine_is_a_503_for_those_that_are_in_and_all_that_come(served: Served) -> None:
    assert (await served.ask()).status_code == 200
    replies = [await served.ask(stop="x"), await served.ask(), await served.client.post("/v1/completions", json={"prompt": [5]})]
    for reply in replies:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")
        assert "no such id" in reply.json()["error"]["message"]
    health = await served.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert "no such id" in health.json()["detail"]


async def test_an_engine_that_fails_in_mid_stream_ends_the_stream_with_an_error(served: Served) -> None:
    reply = await served.client.post("/v1/completions", json={"prompt": [5], "stop": "x", "stream": True, "max_tokens": 2})
    assert reply.status_code == 200 and '"code":"engine_failed"' in reply.text and "[DONE]" not in reply.text


async def test_logits_that_are_not_finite_are_a_500_and_the_server_goes_on(served: Served) -> None:
    served.engine.load(jax.tree.map(lambda x: x * jnp.nan, decode_params()), version=5)
    reply = await served.ask()
    assert reply.status_code == 500 and "version 5 are not finite" in reply.json()["error"]["message"]
    served.engine.load(decode_params(), version=6)
    again = await served.ask()
    assert again.status_code == 200
    assert again.json()["choices"][2]["weight_versions"] == [{"version": "6", "start": 0, "end": 2}]


async def test_a_server_that_stops_admits_nobody(served: Served) -> None:
    served.service.stop_admitting()
    reply = await served.ask()
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the server is stopping")
    assert (await served.client.get("/health")).json()["status"] == "stopping"


async def test_without_alternatives_in_the_programs_plain_logprobs_are_still_to_be_had(served: Served) -> None:
    reply = await served.ask(logprobs=0, prompt_logprobs=0)
    assert reply.json()["choices"][0]["logprobs"]["content"][0]["rank"] is None
    assert len(reply.json()["prompt_logprobs"][1]) == 1
    refused = await served.ask(logprobs=1)
    assert refused.status_code == 400 and "`server.max_logprobs`=0" in refused.json()["error"]["message"]


async def test_a_client_that_does_not_read_its_stream_is_cut_off_and_gives_its_place_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl.engine.server.streams.SEND_GRACE_S", 0.0)
    monkeypatch.setattr(ServeConfig, "request_deadline_s", 0.2)
    body = json.dumps({"prompt": [5], "stream": True, "max_tokens": 2}).encode()
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the connection takes no more bytes

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(5):
        await served.service(scope, told.get, send)


@pytest.mark.parametrize(("is_stopping", "is_stream"), [(True, False), (True, True), (False, False)])
async def test_a_request_that_outlasts_the_drain_is_told_so(served: Served, is_stopping: bool, is_stream: bool) -> None:
    served.engine.pause()
    body = {"prompt": [5], "max_tokens": 2, "stream": is_stream}
    asking = asyncio.create_task(served.client.post("/v1/completions", json=body))
    async with asyncio.timeout(5):
        while not served.engine.stats()["waiting"]:
            await asyncio.sleep(0.001)
    if is_stopping:
        served.service.stop_admitting()
    asking.cancel()
    if is_stopping:
        reply = await asking
        assert reply.status_code == (200 if is_stream else 503)
        assert '"code":"stopped"' in reply.text and "[DONE]" not in reply.text
    else:
        with pytest.raises(asyncio.CancelledError):
            await asking
