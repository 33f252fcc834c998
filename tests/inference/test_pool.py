"""Routing, updates that never go backwards, holds that keep a version still, and errors with a type and a name."""

import asyncio
import logging

import numpy as np
import pytest

from jaxrl.errors import DeadlineError, EngineError, PromptTooLongError
from jaxrl.inference.endpoint import GenerateRequest, Generation, TokenSampling
from jaxrl.inference.pool import PolicyPool
from tests.fakes import ScriptedEndpoint


class LoggedEndpoint(ScriptedEndpoint):
    """Writes down what it is told, and can be slow or fail at one stage."""

    def __init__(self, log: list[str], name: str = "a", *, fails_at: str = "", slow_at: str = "", error: Exception | None = None) -> None:
        super().__init__()
        self.log, self.name, self.fails_at, self.slow_at = log, name, fails_at, slow_at
        self.error = error or RuntimeError("broken")
        self.is_closed = False

    async def _stage(self, stage: str) -> None:
        await asyncio.sleep(60 if stage == self.slow_at else 0)
        self.log.append(f"{self.name}.{stage}")
        if stage == self.fails_at:
            raise self.error

    async def pause(self) -> None:
        await super().pause()
        await self._stage("pause")

    async def load(self, version: int) -> None:
        await self._stage("load")
        await super().load(version)

    async def resume(self) -> None:
        await self._stage("resume")
        await super().resume()

    async def close(self) -> None:
        await self._stage("close")
        self.is_closed = True


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=np.array([1, 2], np.int32), sampling=TokenSampling(max_tokens=8, stop_ids=(2,)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_pool_without_endpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        PolicyPool([], version=0)


async def test_requests_go_to_the_endpoint_with_the_fewest_outstanding_ones() -> None:
    slow, fast = ScriptedEndpoint(latency=lambda r: 60.0 if r.request_id == "slow" else 0.0), ScriptedEndpoint()
    pool = PolicyPool([slow, fast], version=0)
    waiting = asyncio.create_task(pool.generate(request("slow")))
    await settle()
    for index in range(3):
        await pool.generate(request(f"fast{index}"))
    assert [r.request_id for r in slow.requests] == ["slow"]
    assert [r.request_id for r in fast.requests] == ["fast0", "fast1", "fast2"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slow.num_cancelled == 1
    await pool.generate(request("next"))
    assert slow.requests[-1].request_id == "next"  # both are free again
    assert pool._outstanding == [0, 0]


async def test_an_update_pauses_all_then_loads_all_then_resumes_all_and_only_then_announces() -> None:
    log: list[str] = []
    endpoints = [LoggedEndpoint(log, "a"), LoggedEndpoint(log, "b")]
    pool = PolicyPool(endpoints, version=3)
    seen: list[int] = []
    update = asyncio.create_task(pool.update(4))
    while not update.done():
        seen.append(pool.version)
        await asyncio.sleep(0)
    assert [line.split(".")[1] for line in log] == ["pause", "pause", "load", "load", "resume", "resume"]
    assert set(seen) == {3} and pool.version == 4


@pytest.mark.parametrize("order", [(6, 7), (7, 6)])
async def test_concurrent_updates_never_go_backwards(order: tuple[int, int]) -> None:
    endpoint = ScriptedEndpoint(version=5)
    pool = PolicyPool([endpoint], version=5)
    await asyncio.gather(*(pool.update(version) for version in order))
    assert pool.version == 7 and endpoint.loads == sorted(set(endpoint.loads)) and endpoint.loads[-1] == 7
    await pool.update(2)
    assert pool.version == 7 and endpoint.loads[-1] == 7


async def test_a_version_that_was_overtaken_while_it_waited_is_not_loaded() -> None:
    endpoint = ScriptedEndpoint(version=5)
    pool = PolicyPool([endpoint], version=5)
    async with pool.hold_version():
        updates = [asyncio.create_task(pool.update(version)) for version in (6, 7)]
        await settle()
    await asyncio.gather(*updates)
    assert pool.version == 7 and endpoint.loads == [7]


@pytest.mark.parametrize("stage", ["pause", "load", "resume"])
async def test_a_failed_update_resumes_everyone_and_announces_nothing(stage: str) -> None:
    log: list[str] = []
    pool = PolicyPool([LoggedEndpoint(log, "a"), LoggedEndpoint(log, "b", fails_at=stage)], version=0)
    with pytest.raises(EngineError, match=rf"{stage}.* failed on endpoint 1: RuntimeError: broken"):
        await pool.update(1)
    assert {"a.resume", "b.resume"} <= set(log)
    assert pool.version == 0


async def test_an_update_that_hangs_ends_with_the_name_of_the_stage() -> None:
    log: list[str] = []
    pool = PolicyPool([LoggedEndpoint(log, slow_at="load")], version=0, update_deadline_s=0.05)
    with pytest.raises(DeadlineError, match=r"load of version 1 on 1 endpoint\(s\) took more than 0\.05 s"):
        await pool.update(1)
    assert log == ["a.pause", "a.resume"] and pool.version == 0


async def test_a_request_made_during_an_update_is_answered_by_the_new_version() -> None:
    endpoint = LoggedEndpoint([])
    pool = PolicyPool([endpoint], version=0)
    update = asyncio.create_task(pool.update(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    generation = await pool.generate(request())
    await update
    assert set(generation.versions.tolist()) == {1}


async def test_a_hold_delays_an_update_until_it_ends() -> None:
    endpoint = ScriptedEndpoint()
    pool = PolicyPool([endpoint], version=0)
    async with pool.hold_version("evaluation") as version:
        update = asyncio.create_task(pool.update(1))
        await settle()
        assert version == pool.version == 0 and endpoint.loads == [] and not update.done()
        async with pool.hold_version("inner") as inner:  # a hold within a hold cannot wait for the update that waits for it
            assert inner == 0
    await update
    assert pool.version == 1


async def test_an_update_waits_for_the_last_of_several_holds() -> None:
    pool = PolicyPool([ScriptedEndpoint()], version=0)
    first, second = pool.hold_version("first"), pool.hold_version("second")
    await first.__aenter__()
    await second.__aenter__()
    update = asyncio.create_task(pool.update(1))
    await first.__aexit__(None, None, None)
    await settle()
    assert not update.done()
    await second.__aexit__(None, None, None)
    await update


async def test_a_hold_past_its_deadline_is_overtaken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    pool = PolicyPool([ScriptedEndpoint()], version=0)
    with caplog.at_level(logging.WARNING, logger="jaxrl.inference.pool"):
        async with pool.hold_version("evaluation of 'sums'", deadline_s=0.02):
            await pool.update(1)
            assert pool.version == 1
    assert "evaluation of 'sums'" in caplog.text and "version 0 has been held" in caplog.text and "version 1 is loaded" in caplog.text


async def test_a_hold_that_fails_lets_the_update_go() -> None:
    pool = PolicyPool([ScriptedEndpoint()], version=0)
    with pytest.raises(KeyError):
        async with pool.hold_version():
            raise KeyError("evaluation broke")
    await asyncio.wait_for(pool.update(1), 1)


async def test_typed_errors_pass_and_any_other_becomes_an_engine_error() -> None:
    endpoint = ScriptedEndpoint()
    pool = PolicyPool([endpoint], version=0)
    endpoint.failure = PromptTooLongError("too long")
    with pytest.raises(PromptTooLongError):
        await pool.generate(request())
    endpoint.failure = ConnectionResetError("gone")
    with pytest.raises(EngineError, match="generate failed on endpoint 0: ConnectionResetError: gone"):
        await pool.generate(request())


async def test_score_goes_through_the_pool() -> None:
    scores = await PolicyPool([ScriptedEndpoint()], version=0).score(np.array([5, 6, 7], np.int32))
    assert scores.tolist() == [0.0, -1.0, -1.0]


class SilentEndpoint(ScriptedEndpoint):
    """Does not answer `health`."""

    async def health(self):  # type: ignore[no-untyped-def]
        raise ConnectionError("no answer")


async def test_health_reports_a_silent_endpoint_as_not_ready() -> None:
    healths = await PolicyPool([ScriptedEndpoint(version=4), SilentEndpoint()], version=4).health()
    assert [h.is_ready for h in healths] == [True, False]


async def test_close_closes_every_endpoint_even_if_one_fails() -> None:
    endpoints = [LoggedEndpoint([], fails_at="close"), LoggedEndpoint([])]
    with pytest.raises(EngineError, match="close failed on endpoint 0"):
        await PolicyPool(endpoints, version=0).close()
    assert endpoints[1].is_closed


async def test_many_updates_under_load_neither_hang_nor_mix_up_answers() -> None:
    pool = PolicyPool([ScriptedEndpoint(latency=lambda r: 0.0005) for _ in range(3)], version=0)

    async def keep_asking() -> list[Generation]:
        return [await pool.generate(request(f"r{i}")) for i in range(40)]

    async with asyncio.timeout(20):
        askers = [asyncio.create_task(keep_asking()) for _ in range(6)]
        for version in range(1, 30):
            await pool.update(version)
        answers = [g for asker in askers for g in await asker]
    assert pool.version == 29 and len(answers) == 240
    assert all(len(g.token_ids) == len(g.logprobs) == len(g.versions) for g in answers)
