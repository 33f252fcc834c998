"""The fakes keep the promises of the protocols that they stand in for."""

import asyncio

import numpy as np
import pytest

from jaxrl.errors import EngineError
from jaxrl.inference.endpoint import Endpoint, FinishReason, GenerateRequest, TokenSampling
from jaxrl.inference.pool import PolicyPool
from jaxrl.transport.memory import InProcessChannel
from jaxrl.types import TrainBatch
from tests.builders import make_micro_batch
from tests.fakes import FakeClock, FakeTrainer, ScriptedEndpoint, ScriptedPool, hashed_reply


def _request(seed: int = 0, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest("r", np.array([1, 2], np.int32), TokenSampling(max_tokens, seed=seed, stop_ids=(99,)))


async def test_a_scripted_endpoint_is_an_endpoint_and_serves_a_real_pool():
    endpoint = ScriptedEndpoint(version=3)
    assert isinstance(endpoint, Endpoint)
    pool = PolicyPool([endpoint], version=3)
    generation = await pool.generate(_request())
    assert generation.token_ids[-1] == 99 and generation.finish_reason is FinishReason.STOP
    assert generation.versions.tolist() == [3] * len(generation.token_ids)
    assert np.isfinite(generation.logprobs).all()
    await pool.update(4)
    assert (endpoint.loads, endpoint.version, pool.version) == ([4], 4, 4)
    assert (await pool.score(np.array([5, 6, 7]))).tolist() == [0.0, -1.0, -1.0]


def test_a_scripted_reply_depends_on_prompt_seed_and_version_only():
    replies = {
        (seed, version): tuple(hashed_reply(_request(seed), version)) for seed in range(4) for version in range(4)
    }
    assert replies == {k: tuple(hashed_reply(_request(k[0]), k[1])) for k in replies}
    assert len(set(replies.values())) > 12


async def test_a_reply_that_an_update_overtakes_holds_both_versions():
    pool = ScriptedPool(lambda request, version: [1, 2, 3, 4], latency=lambda request: 0.02)
    task = asyncio.create_task(pool.generate(_request()))
    await asyncio.sleep(0.005)
    await pool.update(1)
    assert (await task).versions.tolist() == [0, 0, 1, 1]


async def test_a_cut_reply_ends_for_length_and_a_paused_endpoint_waits():
    endpoint = ScriptedEndpoint(lambda request, version: [1, 2, 3, 4])
    assert (await endpoint.generate(_request(max_tokens=2))).finish_reason is FinishReason.LENGTH
    await endpoint.pause()
    task = asyncio.create_task(endpoint.generate(_request()))
    await asyncio.sleep(0.005)
    assert not task.done() and endpoint.num_running == 1
    await endpoint.resume()
    await task


async def test_a_cancelled_request_leaves_the_endpoint():
    endpoint = ScriptedEndpoint(latency=lambda request: 60)
    task = asyncio.create_task(endpoint.generate(_request()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (endpoint.num_running, endpoint.num_cancelled) == (0, 1)


async def test_a_failing_endpoint_raises_what_it_was_told():
    endpoint = ScriptedEndpoint()
    endpoint.failure = EngineError("gone")
    with pytest.raises(EngineError, match="gone"):
        await endpoint.generate(_request())


async def test_a_held_version_delays_the_update():
    pool = ScriptedPool()
    async with pool.hold_version() as version:
        update = asyncio.create_task(pool.update(1))
        await asyncio.sleep(0.005)
        assert (version, pool.version) == (0, 0)
    await update
    assert pool.version == 1


async def test_the_fake_trainer_announces_then_reports_and_ends_with_the_channel():
    channel = InProcessChannel(1)
    applied: list[int] = []
    trainer = FakeTrainer(channel, on_applied=applied.append)
    trainer.start()
    counts = np.zeros((1, 3), np.int32)
    batch = TrainBatch(
        step=1, micro_batches=[make_micro_batch()], member_counts=counts, num_samples=1, num_tokens=5, num_loss_tokens=3
    )
    await channel.send(batch, 5.0)
    assert await channel.next_version(0, 5.0) == 1
    assert (await channel.next_report(5.0)).step == 1
    channel.close()
    await asyncio.to_thread(trainer.join)
    assert (applied, trainer.failure) == ([1], None)


def test_a_fake_clock_moves_when_told():
    clock = FakeClock()
    clock.advance(2.5)
    assert clock() == 2.5
