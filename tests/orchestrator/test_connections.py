"""What the environments connect to is set up in one go before the first rollout, and closed whatever happens."""

import asyncio
import logging
from typing import Any

import pytest

from jaxrl.blame import component_of_error
from jaxrl.config.algorithm import GRPOConfig
from jaxrl.errors import DeadlineError, EngineError
from jaxrl.orchestrator import connections
from jaxrl.orchestrator.algo import GRPO
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.sources import DemonstrationSource
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import ROW_LENGTH, Run, make_env, make_run, renderer


class Model:
    """A pool of a frozen model that takes its time, or fails."""

    def __init__(self, name: str, *, ready: asyncio.Event | None = None, failure: Exception | None = None) -> None:
        self.name = name
        self.ready = ready
        self.failure = failure
        self.close_failure: Exception | None = None
        self.closes_after: asyncio.Event | None = None
        self.log: list[str] = []

    def __str__(self) -> str:
        return f"frozen model {self.name!r} at http://{self.name}/v1"

    async def setup(self) -> None:
        self.log.append("asked")
        try:
            if self.ready is not None:
                await self.ready.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        if self.failure is not None:
            raise self.failure
        self.log.append("ready")

    async def close(self) -> None:
        if self.closes_after is not None:
            await self.closes_after.wait()
        if self.close_failure is not None:
            raise self.close_failure
        self.log.append("closed")


class Judged(GRPO):
    """Has a teacher."""

    def __init__(self, teacher: Model, pool: ScriptedPool) -> None:
        super().__init__(GRPOConfig(), pool)
        self.teacher = teacher

    async def setup(self) -> None:
        self.connected_pools.append(self.teacher)  # type: ignore[arg-type]
        await self.teacher.setup()


class Played:
    """A source with a model of its own; its replies are demonstrations."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.connected_pools: list[Model] = []
        shown = DemonstrationSource(renderer(), lambda spec: "A", ROW_LENGTH)
        self.renderer, self.is_live_policy, self.places = shown.renderer, False, shown.places
        self.open_session = shown.open_session

    async def setup(self) -> None:
        self.connected_pools.append(self.model)
        await self.model.setup()


def run_with(teacher: Model, source: Model, **settings: Any) -> Run:
    def envs(pool: ScriptedPool) -> list[TrainEnv]:
        judged = make_env(pool, ToyEnv("judged"), algorithm=Judged(teacher, pool))
        return [judged, make_env(pool, ToyEnv("played"), source=Played(source))]  # type: ignore[arg-type]

    return make_run(envs=envs, max_steps=1, **settings)


async def test_everything_is_set_up_at_once_and_before_the_first_rollout_and_closed_at_the_end() -> None:
    ready = asyncio.Event()
    teacher, source = Model("teacher", ready=ready), Model("source", ready=ready)
    run = run_with(teacher, source)
    playing = asyncio.create_task(run.play())
    while not (teacher.log and source.log):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert run.pool.endpoint.requests == [] and not run.monitors.rollouts
    ready.set()
    await playing
    assert teacher.log == source.log == ["asked", "ready", "closed"]
    assert run.pool.endpoint.requests and {r.env_name for r in run.monitors.rollouts[1]} <= {"judged", "played"}


async def test_the_first_failure_cancels_the_others_and_is_raised_with_its_environment_and_all_are_closed() -> None:
    teacher, source = Model("teacher", failure=EngineError("does not serve it")), Model("source", ready=asyncio.Event())
    run = run_with(teacher, source)
    with pytest.raises(EngineError, match="does not serve it") as caught:
        await run.play()
    assert component_of_error(caught.value) == "environment 'judged'"
    assert teacher.log == ["asked", "closed"] and source.log == ["asked", "cancelled", "closed"]
    assert run.trainer.failure is None and run.batches == []


async def test_whom_the_run_waits_for_is_shown_and_named_when_the_deadline_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    teacher, source = Model("teacher", ready=asyncio.Event()), Model("source")
    run = run_with(teacher, source, wait_deadline_s=0.2)
    match = r"not set up within 0.2 s \(`orchestrator.wait_deadline_s`\): still waiting for frozen model 'teacher' at http://teacher/v1$"
    with pytest.raises(DeadlineError, match=match):
        await run.play()
    shown = [status for status in run.monitors.statuses if status]
    assert shown == ["waiting for frozen model 'teacher' at http://teacher/v1"] and run.monitors.statuses[-1] == ""
    assert teacher.log == ["asked", "cancelled", "closed"] and source.log == ["asked", "ready", "closed"]


async def test_a_run_that_is_told_to_stop_does_not_go_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    teacher, source = Model("teacher", ready=asyncio.Event()), Model("source")
    run = run_with(teacher, source)
    playing = asyncio.create_task(run.play())
    while not teacher.log:
        await asyncio.sleep(0)
    run.orchestrator.request_stop()
    await asyncio.wait_for(playing, 5.0)
    assert run.batches == [] and teacher.log == ["asked", "cancelled", "closed"]


async def test_a_pool_that_fails_to_close_or_takes_too_long_keeps_no_other_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "CLOSE_DEADLINE_S", 0.05)
    first, second, third = Model("first"), Model("second"), Model("third")
    first.close_failure, second.closes_after = RuntimeError("half closed"), asyncio.Event()

    def envs(pool: ScriptedPool) -> list[TrainEnv]:
        return [make_env(pool, ToyEnv(m.name), algorithm=Judged(m, pool)) for m in (first, second, third)]

    run = make_run(envs=envs, max_steps=1)
    with caplog.at_level(logging.WARNING):
        await run.play()
    assert third.log[-1] == "closed"
    assert "frozen model 'first' at http://first/v1 did not close: RuntimeError: half closed" in caplog.text
    assert "frozen model 'second' at http://second/v1 did not close: it took more than 0.05 s" in caplog.text


async def test_a_failure_of_the_run_is_not_hidden_by_one_of_closing() -> None:
    teacher = Model("teacher", failure=EngineError("no scores"))
    teacher.close_failure = RuntimeError("half closed")
    with pytest.raises(EngineError, match="no scores"):
        await run_with(teacher, Model("source")).play()
