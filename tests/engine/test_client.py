"""The engine behind the endpoint protocol, with a thread of its own that ticks it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from jaxrl.engine import EmbeddedEndpoint, Engine
from jaxrl.errors import DeadlineError, EngineError, PromptTooLongError
from jaxrl.inference.endpoint import PolicyEndpoint
from jaxrl.weights import WeightStore
from tests.engine.tiny import SPEC, WINDOW, full_logprobs, generate, make_engine, make_request, trainer_params


class TickingThread:
    """Ticks an engine whenever it is woken: the smallest device thread."""

    def __init__(self, engine: Engine) -> None:
        self.num_wakes = 0
        self.may_tick = threading.Event()
        self.may_tick.set()
        self._engine = engine
        self._wanted = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for work."""
        self.num_wakes += 1
        self._wanted.set()

    def stop(self) -> None:
        """End the thread."""
        self._is_over = True
        self.may_tick.set()
        self.wake()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._is_over:
            self._wanted.wait()
            self._wanted.clear()
            while self._engine.has_work() and not self._is_over:
                self.may_tick.wait()
                self._engine.tick()


class Served:
    """An engine, its thread, its store and its endpoint."""

    def __init__(self, **settings: object) -> None:
        self.engine = make_engine(**settings)
        self.thread = TickingThread(self.engine)
        self.store = WeightStore(SPEC, "float32")
        self.endpoint = EmbeddedEndpoint(self.engine, self.thread, self.store)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = Served()
    yield server
    server.thread.stop()


def test_it_is_an_endpoint() -> None:
    assert issubclass(EmbeddedEndpoint, PolicyEndpoint)


async def test_concurrent_requests_get_their_own_answers(served: Served) -> None:
    requests = [make_request(f"r{i}", (i, i + 1, i + 2), max_tokens=6, seed=i) for i in range(20)]
    answers = await asyncio.gather(*(served.endpoint.generate(request) for request in requests))
    for answer, expected in zip(answers, generate(make_engine(), *requests), strict=True):
        assert answer.token_ids.tolist() == expected.token_ids.tolist()
    health = await served.endpoint.health()
    assert health.is_ready and health.num_running == health.num_waiting == 0
    assert health.detail["generated_tokens"] == 20 * 6


async def test_cancelling_the_task_frees_the_slot(served: Served) -> None:
    served.thread.may_tick.clear()
    task = asyncio.create_task(served.endpoint.generate(make_request("gone", max_tokens=25)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    served.thread.may_tick.set()
    await served.endpoint.generate(make_request("next", max_tokens=2))
    assert served.engine.stats()["running"] == 0
    assert served.engine.stats()["generated_tokens"] < 25


async def test_loading_takes_the_version_from_the_store(served: Served) -> None:
    served.store.publish(1, trainer_params(1))
    await served.endpoint.pause()
    await served.endpoint.load(1)
    await served.endpoint.resume()
    answer = await served.endpoint.generate(make_request(seed=1))
    assert (await served.endpoint.health()).version == 1
    assert set(answer.versions.tolist()) == {1}
    tokens = np.arange(9)
    np.testing.assert_allclose(await served.endpoint.score(tokens), full_logprobs(tokens, seed=1), rtol=0, atol=1e-5)
    with pytest.raises(EngineError, match="version 7 is not in memory"):
        await served.endpoint.load(7)


async def test_refusals_come_back_as_exceptions(served: Served) -> None:
    with pytest.raises(PromptTooLongError):
        await served.endpoint.generate(make_request(prompt=[1] * WINDOW))
    with pytest.raises(EngineError, match="score"):
        await served.endpoint.score(np.arange(0))


async def test_a_stuck_device_thread_ends_in_a_deadline_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.engine.client.DEADLINE_GRACE_S", 0.05)
    server = Served(request_deadline_s=0.05)
    server.thread.may_tick.clear()
    with pytest.raises(DeadlineError, match=r"'stuck' got no answer within 0.1 s: the device thread is busy or stuck; engine decoding"):
        await server.endpoint.generate(make_request("stuck"))
    with pytest.raises(DeadlineError, match=r"the score of 3 tokens did not come within 0.1 s: the device thread is busy or stuck"):
        await server.endpoint.score(np.arange(3))
    server.thread.stop()


async def test_closing_cancels_what_is_outstanding(served: Served) -> None:
    await served.endpoint.pause()
    task = asyncio.create_task(served.endpoint.generate(make_request(max_tokens=25)))
    await asyncio.sleep(0.01)
    await served.endpoint.close()
    answer = await asyncio.wait_for(task, 5.0)
    assert answer.finish_reason == "cancelled"
