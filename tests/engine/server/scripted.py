"""A service whose replies are given beforehand, on a real socket: everything but the sampling is what `jaxrl.serve` runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import uvicorn

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.serve import ServeConfig, ServedModelConfig, ServerConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine import EmbeddedEndpoint, Engine
from jaxrl.engine.server import Backend, Service
from jaxrl.engine.slots import SampledTokens
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation
from jaxrl.inference.rendering import Renderer
from jaxrl.models.decode import to_decode_params
from jaxrl.models.transformer import build_model
from jaxrl.weights import WeightStore
from tests.engine.tiny import SPEC, random_params

WINDOW = 2048
Script = Callable[[GenerateRequest], Sequence[int]]
"""request -> the ids that are sampled, the stop id included if the reply stops."""


class ScriptedSampling(EmbeddedEndpoint):
    """An endpoint over an engine that is never asked: its tokens come from a script, `piece` at a time."""

    def __init__(self, engine: Engine, script: Script, *, piece: int = 3) -> None:
        super().__init__(engine, DeviceThread("never started"), WeightStore(engine.spec, "float32"))
        self.script = script
        self.sampled: list[tuple[list[int], list[int]]] = []
        """The prompt and the sampled ids of each request that was answered, in order."""
        self.num_cancelled = 0
        self.holds: asyncio.Event | None = None
        """While there is one, a reply stops after its first piece and waits for it."""
        self._piece = piece

    async def generate(self, request: GenerateRequest, on_tokens: Callable[[SampledTokens], None] | None = None) -> Generation:
        """Answer from the script."""
        try:
            ids = list(self.script(request))[: request.sampling.max_tokens]
            for at in range(0, len(ids), self._piece):
                if on_tokens is not None:
                    on_tokens(SampledTokens(**_streams(ids[at : at + self._piece]), top_ids=None, top_logprobs=None))
                await asyncio.sleep(0)
                if self.holds is not None:
                    await self.holds.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.sampled.append((request.token_ids.tolist(), ids))
        is_stopped = bool(ids) and (ids[-1] in request.sampling.stop_ids or bool(request.sampling.stop))
        return Generation(**_streams(ids), finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH)


def _streams(ids: list[int]) -> dict[str, Any]:
    num = len(ids)
    return {"token_ids": np.asarray(ids, np.int32), "logprobs": np.full(num, -0.5, np.float32), "versions": np.zeros(num, np.int32)}


@dataclasses.dataclass(frozen=True)
class Served:
    """A service that is served."""

    url: str
    """Ends in `/v1`."""
    service: Service
    endpoint: ScriptedSampling

    def told(self, name: str) -> float:
        """Return a number of `/metrics`, by its name and labels."""
        text = httpx.get(self.url.removesuffix("/v1") + "/metrics").text
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.rsplit(" ", 1)[0] == name)


@contextlib.contextmanager
def served(renderer: Renderer, script: Script, *, piece: int = 3, max_logprobs: int = 0, **server: Any) -> Iterator[Served]:
    """Serve a script on a loopback port while the block runs."""
    spec = dataclasses.replace(SPEC, vocab_size=renderer.num_ids, max_position_embeddings=WINDOW)
    inference = EmbeddedInferenceConfig(num_slots=8, max_model_len=WINDOW)
    params = to_decode_params(random_params(build_model(spec), 0), spec, "float32")
    engine = Engine(spec, params, inference, version=0, decode_text=renderer.decode, max_logprobs=max_logprobs)
    endpoint = ScriptedSampling(engine, script, piece=piece)
    service = Service(ServeConfig(model=ServedModelConfig(name="tiny"), inference=inference, server=ServerConfig(port=0, **server)))
    service.attach(Backend(engine, endpoint, renderer))
    app = uvicorn.Server(uvicorn.Config(service, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=app.run)
    thread.start()
    try:
        ends_at = time.monotonic() + 20
        while not app.started:
            assert time.monotonic() < ends_at and thread.is_alive(), "the server did not start within 20 s"
            time.sleep(0.005)
        port = app.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}/v1", service, endpoint)
    finally:
        app.should_exit = True
        thread.join(timeout=20)
        service.close()
    assert not thread.is_alive() and service.num_sequences == 0
