"""The base and the final policy are always measured: once each, whether a run ends at once, is stopped and resumed, or dies at its end."""

from __future__ import annotations

import asyncio

import pytest

from tests.orchestrator.wiring import Run, make_run


def measured_run(measured: list[tuple[int, int]], **settings) -> Run:
    """Return a run that notes what it measures, after how many batches of its own."""

    async def evaluate(step: int, version: int) -> None:
        assert version == run.pool.version == step
        measured.append((step, len(run.batches)))

    run = make_run(max_steps=4, evaluate=evaluate, **settings)
    return run


async def test_1_a_whole_run_measures_version_0_before_any_batch_and_the_last_version_after_all() -> None:
    measured: list[tuple[int, int]] = []
    await measured_run(measured).play()
    assert measured == [(0, 0), (4, 4)]


async def test_2_a_run_that_was_stopped_and_resumed_measures_each_of_them_once() -> None:
    measured: list[tuple[int, int]] = []
    loop = asyncio.get_running_loop()

    def stop_at_two(step: int) -> None:
        if step == 2:
            loop.call_soon_threadsafe(first.orchestrator.request_stop)

    first = measured_run(measured, on_applied=stop_at_two)
    await first.play()
    assert (measured, len(first.batches)) == ([(0, 0)], 2)
    second = measured_run(measured, start_version=2)
    second.orchestrator.restore(first.orchestrator.snapshot(2))
    await second.play()
    assert measured == [(0, 0), (4, 2)]


async def test_3_a_run_that_died_after_its_last_checkpoint_measures_the_final_policy_when_it_is_resumed() -> None:
    first = make_run(max_steps=4)
    await first.play()
    measured: list[tuple[int, int]] = []
    second = measured_run(measured, start_version=4)
    second.orchestrator.restore(first.orchestrator.snapshot(4))
    await second.play()
    assert measured == [(4, 0)]
    assert second.batches == []


@pytest.mark.parametrize(("stopped", "expected"), [(2, [(2, 0), (4, 2)]), (3, [(4, 1)])])
async def test_4_a_run_that_ended_before_the_measurement_that_was_due_at_its_last_step_makes_it_when_it_is_resumed(
    stopped: int, expected: list[tuple[int, int]]
) -> None:
    loop = asyncio.get_running_loop()

    def stop(step: int) -> None:
        if step == stopped:
            loop.call_soon_threadsafe(first.orchestrator.request_stop)

    first = make_run(max_steps=4, on_applied=stop)
    await first.play()
    measured: list[tuple[int, int]] = []
    second = measured_run(measured, start_version=stopped, eval={"every_n_steps": 2})
    second.orchestrator.restore(first.orchestrator.snapshot(stopped))
    await second.play()
    assert measured == expected
