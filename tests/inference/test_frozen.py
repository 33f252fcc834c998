"""The pool of a frozen model: who gets a request, what becomes of endpoints that fail, and what `setup` finds out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.envs.session import PolicySession
from jaxrl.errors import ConfigError, DeadlineError, EndpointDownError, EngineError, PromptTooLongError
from jaxrl.inference.endpoint import NO_VERSION, GenerateRequest, TokenSampling
from jaxrl.inference.frozen import FrozenPool, connect_frozen_pool
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout, Task
from tests.fakes import ScriptedEndpoint
from tests.inference.wire_server import MODEL, WINDOW, FakeModel, WireServer

IDS = np.array([5, 6, 7], np.int32)


class FrozenScript(ScriptedEndpoint):
    """A frozen endpoint by script: `down` is why it is down, `window` what it tells."""

    def __init__(self, *, down: str = "", window: int | None = None, latency: float = 0.0) -> None:
        super().__init__(latency=lambda _: latency)
        self.down, self.window, self.num_probes, self.is_closed = down, window, 0, False

    async def probe(self) -> int | None:
        self.num_probes += 1
        if self.down:
            raise EndpointDownError(self.down)
        return self.window

    async def generate(self, request: GenerateRequest):  # type: ignore[no-untyped-def]
        self.failure = EndpointDownError(self.down) if self.down else self.failure
        return await super().generate(request)

    async def tokenize(self, text: str) -> np.ndarray | None:
        return None

    async def detokenize(self, token_ids: np.ndarray) -> str | None:
        return None

    async def close(self) -> None:
        self.is_closed = True


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=IDS, sampling=TokenSampling(max_tokens=4))


def pool_of(cool_down_s: float = 0.02, **endpoints: FrozenScript) -> FrozenPool:
    return FrozenPool(MODEL, endpoints, cool_down_s=cool_down_s)


async def test_requests_go_to_the_endpoint_with_the_fewest_outstanding_ones_and_no_more_than_the_places() -> None:
    a, b = FrozenScript(latency=0.01), FrozenScript(latency=0.01)
    pool = FrozenPool(MODEL, {"a": a, "b": b}, max_concurrency=3)
    asked = [asyncio.create_task(pool.generate(request(str(index)))) for index in range(10)]
    await asyncio.sleep(0.005)
    assert sorted((a.num_running, b.num_running)) == [1, 2]
    await asyncio.gather(*asked)
    assert len(a.requests) + len(b.requests) == 10
    await pool.close()


async def test_what_a_dead_endpoint_could_not_take_goes_to_another_and_it_is_left_alone_until_a_probe_finds_it_well() -> None:
    dead, well = FrozenScript(down="connection refused"), FrozenScript()
    pool = pool_of(dead=dead, well=well)
    for index in range(4):
        await pool.generate(request(str(index)))
    assert len(dead.requests) == 1 and len(well.requests) == 4
    dead.down, dead.failure = "", None
    await asyncio.sleep(0.03)
    await pool.generate(request("starts the probe"))
    await asyncio.sleep(0.01)
    assert dead.num_probes == 1
    await pool.generate(request("is taken again"))
    assert len(dead.requests) == 2
    await pool.close()
    assert dead.is_closed and well.is_closed


async def test_a_server_that_goes_down_and_one_that_is_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dead, well = FrozenScript(down="connection refused", latency=0.01), FrozenScript(latency=0.01)
    pool = pool_of(dead=dead, well=well)
    await asyncio.gather(*(pool.generate(request(str(index))) for index in range(6)))
    await asyncio.sleep(0.03)
    await pool.generate(request("starts a probe in vain"))
    await asyncio.sleep(0.03)
    dead.down, dead.failure = "", None
    await pool.generate(request("starts the probe"))
    await asyncio.sleep(0.01)
    assert caplog.messages == [
        "frozen model 'toy': dead does not answer: connection refused; 1 of 2 servers are left to take its requests; it is asked again "
        "every 0.02 s",
        "frozen model 'toy': dead answers again",
    ]
    await pool.close()


async def test_with_every_endpoint_down_the_error_names_each_and_why_after_one_probe() -> None:
    a, b = FrozenScript(down="refused"), FrozenScript(down="status 503: loading")
    pool = pool_of(a=a, b=b)
    with pytest.raises(EngineError, match=r"'toy': generate has nowhere to go, .* a: refused; b: status 503: loading"):
        await pool.generate(request())
    assert (a.num_probes, b.num_probes) == (1, 1)
    await pool.close()


async def test_a_request_that_finds_every_endpoint_down_waits_for_the_first_that_recovers() -> None:
    a, b = FrozenScript(down="refused"), FrozenScript(down="refused")
    pool = pool_of(0.05, a=a, b=b)
    asked = asyncio.create_task(pool.generate(request()))
    await asyncio.sleep(0.01)
    b.down, b.failure = "", None
    assert len((await asked).token_ids) > 0 and len(b.requests) == 2
    await pool.close()


async def test_a_request_that_no_endpoint_would_take_is_not_passed_on() -> None:
    a, b = FrozenScript(), FrozenScript()
    a.failure = b.failure = PromptTooLongError("too long")
    pool = pool_of(a=a, b=b)
    for _ in range(3):
        with pytest.raises(PromptTooLongError):
            await pool.generate(request())
    a.failure = b.failure = KeyError("bug")
    with pytest.raises(EngineError, match=r"generate failed on [ab]: KeyError: 'bug'"):
        await pool.generate(request())
    assert len(a.requests) + len(b.requests) == 4
    await pool.close()


async def test_an_endpoint_that_lets_a_request_run_past_its_deadline_is_left_alone() -> None:
    slow, well = FrozenScript(), FrozenScript()
    slow.failure = DeadlineError("no answer within 5 s")
    pool = pool_of(60.0, slow=slow, well=well)
    with pytest.raises(DeadlineError):
        await pool.generate(request())
    for _ in range(3):
        await pool.generate(request())
    assert len(slow.requests) == 1
    await pool.close()


async def test_a_call_has_one_deadline_however_many_endpoints_had_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.inference.frozen.DEADLINE_GRACE_S", 0.0)

    class Refuses(FrozenScript):
        async def generate(self, request: GenerateRequest):  # type: ignore[no-untyped-def]
            raise EndpointDownError("busy")  # while its probe says that it is well

    pool = FrozenPool(MODEL, {"a": Refuses()}, timeout_s=0.05, cool_down_s=0.001)
    with pytest.raises(DeadlineError, match=r"generate got no answer within 0\.05 s; a: "):
        await pool.generate(request())
    await pool.close()


async def test_setup_waits_for_servers_that_are_starting_and_takes_the_smallest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.inference.frozen.SETUP_PAUSE_S", 0.001)
    starting, silent = FrozenScript(down="refused", window=128), FrozenScript(window=64)
    pool = pool_of(starting=starting, silent=silent)
    ready = asyncio.create_task(pool.setup(window=63, scored_ids=IDS))
    await asyncio.sleep(0.01)
    assert not ready.done()
    starting.down = ""
    await ready
    assert pool.window == 64
    with pytest.raises(ConfigError, match=r"silent holds sequences of 64 tokens, and some may have 65; serve"):
        await pool.setup(window=65)
    with pytest.raises(ConfigError, match=r"some may have 65 \(64 to score, and one that the server samples after them\)"):
        await pool.setup(window=64, scored_ids=IDS)


async def test_setup_waits_for_a_server_that_is_well_and_does_not_score_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.inference.frozen.SETUP_PAUSE_S", 0.001)

    class Warming(FrozenScript):
        num_refused = 0

        async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
            if self.num_refused < 3:
                self.num_refused += 1
                raise EndpointDownError("status 503: it is loading")
            return await super().score(token_ids, temperature)

    warming = Warming()
    await pool_of(a=warming).setup(scored_ids=IDS, deadline_s=5)
    assert warming.num_refused == 3


async def test_setup_ends_at_its_deadline_with_who_is_not_ready() -> None:
    pool = pool_of(a=FrozenScript(), b=FrozenScript(down="connection refused"))
    with pytest.raises(DeadlineError, match=r"'toy' was not ready within 0.02 s \(`ready_deadline_s`\): b: connection refused$"):
        await pool.setup(deadline_s=0.02)


async def test_a_configured_pool_waits_as_long_as_it_is_configured_to() -> None:
    config = FrozenModelConfig(name="toy", base_url=["http://127.0.0.1:9/v1"], ready_deadline_s=0.02)
    pool = connect_frozen_pool(config, {})
    with pytest.raises(DeadlineError, match=r"'toy' was not ready within 0.02 s"):
        await pool.setup()
    await pool.close()


async def test_setup_fails_at_once_for_the_wrong_model() -> None:
    class Wrong(FrozenScript):
        async def probe(self) -> int | None:
            raise EngineError("http://x/v1 does not serve 'toy'")

    with pytest.raises(EngineError, match="does not serve 'toy'"):
        await pool_of(a=FrozenScript(), b=Wrong()).setup(deadline_s=30)


async def test_a_configured_pool_plays_scores_and_goes_on_when_one_of_its_servers_dies() -> None:
    first, second = WireServer(FakeModel(key="sesame")), WireServer(FakeModel(key="sesame", has_tokens_route=False))
    async with second.running(), AsyncExitStack() as first_running:
        await first_running.enter_async_context(first.running())
        config = FrozenModelConfig(name=MODEL, base_url=[first.base_url, second.base_url], api_key_var="KEY", max_attempts=1, timeout_s=10)
        pool: Pool = connect_frozen_pool(config, {"KEY": "sesame"})
        assert isinstance(pool, FrozenPool)
        await pool.setup(window=WINDOW - 1, scored_ids=IDS)
        generations = await asyncio.gather(*(pool.generate(request()) for _ in range(8)))
        assert all(generation.versions.tolist() == [NO_VERSION] * 4 for generation in generations)
        assert [health.is_ready for health in await pool.health()] == [True, True]
        assert first.most_waiting > 0 and second.most_waiting > 0
        await first_running.aclose()
        scores = await asyncio.gather(*(pool.score(IDS) for _ in range(4)))
        assert all(np.array_equal(score, scores[0]) for score in scores)
        assert [health.is_ready for health in await pool.health()] == [False, True]
        await pool.close()


async def test_a_session_can_be_answered_by_a_frozen_model() -> None:
    renderer = Renderer.from_pretrained("tests/golden/tokenizer")
    rollout = Rollout(Task("toy", "t", {}), "g", member=0, draw_index=0)
    pool = pool_of(a=FrozenScript())
    session = PolicySession(pool, renderer, rollout, SamplingConfig(max_tokens=8), run_seed=0, seed_scope="toy", window=128)
    await session.ask([{"role": "user", "content": "hi"}])
    assert rollout.nodes[-1].sampled
    await pool.close()


def test_the_key_must_be_there_when_the_pool_is_built() -> None:
    config = FrozenModelConfig(name=MODEL, base_url=["http://127.0.0.1:1/v1"], api_key_var="TEACHER_KEY")
    for environ in ({}, {"TEACHER_KEY": " "}):
        with pytest.raises(ConfigError, match="`api_key_var`='TEACHER_KEY': the environment variable TEACHER_KEY is not set or empty"):
            connect_frozen_pool(config, environ)


def test_a_pool_without_endpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        FrozenPool(MODEL, {})
