"""When a training loop of anybody's measures, what it is told, and what happens when measuring fails."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.config.evals import EvalConfig
from jaxrl.evals.result import EvalResult
from jaxrl.evals.schedule import EvalSchedule

CONFIG = EvalConfig(dataset="sums")


class Scripted:
    """A harness whose scores are the step, and which fails at some steps."""

    def __init__(self, *, fails_at: frozenset[int] = frozenset()) -> None:
        self.steps: list[int] = []
        self.fails_at = fails_at

    async def run(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
        assert config is CONFIG and not resume
        if step in self.fails_at:
            raise RuntimeError(f"no environment at step {step}")
        self.steps.append(step)
        return EvalResult(config, "sums", step, None, {"success_rate": float(step)})


def test_the_base_policy_and_every_nth_step_are_measured_once_and_the_caller_is_told() -> None:
    harness, told = Scripted(), []
    schedule = EvalSchedule(harness, CONFIG, every_n_steps=3, on_result=lambda step, result: told.append((step, result)))
    results = [schedule.maybe_run(step) for step in range(8)]
    assert [result is not None for result in results] == [True, False, False, True, False, False, True, False]
    assert harness.steps == [step for step, _ in told] == [0, 3, 6]
    assert [result.step for _, result in told] == [0, 3, 6] and results[3] is told[1][1]


def test_the_start_can_be_left_out_and_the_final_policy_is_always_measured_once() -> None:
    harness = Scripted()
    schedule = EvalSchedule(harness, CONFIG, every_n_steps=5, run_at_start=False)
    for step in range(8):
        schedule.maybe_run(step)
    assert harness.steps == [5]
    assert schedule.final(7) is not None and schedule.final(7) is None
    assert harness.steps == [5, 7] == schedule.measured_steps
    even = EvalSchedule(Scripted(), CONFIG, every_n_steps=1)
    assert even.maybe_run(4) is not None and even.final(4) is None


@given(st.integers(1, 6), st.lists(st.integers(0, 20), max_size=30), st.booleans())
def test_no_step_is_measured_twice_whatever_is_asked_and_where_it_is_saved(every: int, asked: list[int], is_saved: bool) -> None:
    harness = Scripted()
    schedule = EvalSchedule(harness, CONFIG, every_n_steps=every)
    for step in asked:
        schedule.maybe_run(step)
        if is_saved:
            state = json.loads(json.dumps(schedule.state_dict()))
            schedule = EvalSchedule(harness, CONFIG, every_n_steps=every)
            schedule.load_state_dict(state)
    assert harness.steps == list(dict.fromkeys(step for step in asked if step % every == 0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda told: lambda step, result: told.append((step,)), (2,)),
        (lambda told: lambda step, result, counters: told.append((step, counters)), (2, {"episodes": 8.0, "cost": 100.0})),
        (lambda told: lambda step, result, log=told: log.append((step,)), (2,)),
    ],
    ids=["two", "three", "a third one of its own"],
)
def test_a_function_that_needs_three_arguments_is_told_what_training_had_cost_before(
    make: Callable[[list[Any]], Any], expected: Any
) -> None:
    told: list[Any] = []
    counters = {"episodes": 8.0, "cost": 100.0}

    class Spends(Scripted):
        async def run(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
            counters["episodes"] += 1000  # what measuring costs is no cost of training
            return await super().run(config, step=step, resume=resume)

    EvalSchedule(Spends(), CONFIG, every_n_steps=2, on_result=make(told), counters=lambda: counters).maybe_run(2)
    assert told == [expected]


def test_without_counters_a_function_of_three_arguments_is_told_none() -> None:
    told: list[Any] = []
    EvalSchedule(Scripted(), CONFIG, every_n_steps=1, on_result=lambda step, result, counters: told.append(counters)).maybe_run(1)
    assert told == [{}]


def test_a_failing_evaluation_ends_the_loop_or_is_logged_and_its_step_counts_as_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    raising = EvalSchedule(Scripted(fails_at=frozenset({2})), CONFIG, every_n_steps=2)
    with pytest.raises(RuntimeError, match="no environment at step 2"):
        raising.maybe_run(2)
    harness, told = Scripted(fails_at=frozenset({2})), []
    logging_on = EvalSchedule(harness, CONFIG, every_n_steps=2, on_error="log", on_result=lambda step, result: told.append(step))
    with caplog.at_level(logging.ERROR):
        results = [logging_on.maybe_run(step) for step in range(5)]
    assert [result is not None for result in results] == [True, False, False, False, True] and told == [0, 4]
    (record,) = caplog.records
    assert "the evaluation of 'sums' after step 2 failed" in record.getMessage() and "no environment at step 2" in str(record.exc_info)
    assert logging_on.is_due(2) and logging_on.measured_steps == [0, 4]


def test_what_on_result_raises_goes_to_the_caller_and_the_step_stays_measured() -> None:
    def fail(step: int, result: EvalResult) -> None:
        raise OSError("disk full")

    harness = Scripted()
    schedule = EvalSchedule(harness, CONFIG, every_n_steps=1, on_error="log", on_result=fail)
    with pytest.raises(OSError, match="disk full"):
        schedule.maybe_run(1)
    assert schedule.maybe_run(1) is None and harness.steps == [1]


async def test_within_a_coroutine_it_is_awaited_and_so_is_what_on_result_returns() -> None:
    told: list[int] = []

    async def on_result(step: int, result: EvalResult) -> None:
        told.append(step)

    schedule = EvalSchedule(Scripted(), CONFIG, every_n_steps=2, on_result=on_result)
    assert await schedule.maybe_run_async(1) is None
    result = await schedule.maybe_run_async(2)
    assert result is not None and result.step == 2 and told == [2]
    assert await schedule.final_async(3) is not None and await schedule.final_async(3) is None
    assert told == [2, 3]


async def test_a_loop_in_a_notebook_where_an_event_loop_is_running_measures_all_the_same() -> None:
    told: list[tuple[int, int]] = []

    async def on_result(step: int, result: EvalResult) -> None:
        told.append((step, result.step))

    schedule = EvalSchedule(Scripted(), CONFIG, every_n_steps=2, on_result=on_result)
    result = schedule.maybe_run(2)
    assert result is not None and schedule.final(3) is not None and told == [(2, 2), (3, 3)]
    with pytest.raises(RuntimeError, match="no environment at step 4"):
        EvalSchedule(Scripted(fails_at=frozenset({4})), CONFIG, every_n_steps=2).maybe_run(4)


def test_a_schedule_is_refused_that_could_never_be_kept_and_a_state_of_something_else() -> None:
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 1, got 0"):
        EvalSchedule(Scripted(), CONFIG, every_n_steps=0)
    with pytest.raises(ValueError, match="`on_error` must be 'raise' or 'log'"):
        EvalSchedule(Scripted(), CONFIG, every_n_steps=1, on_error="ignore")  # type: ignore[arg-type]
    schedule = EvalSchedule(Scripted(), CONFIG, every_n_steps=1)
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        schedule.maybe_run(-1)
    with pytest.raises(TypeError):
        schedule.maybe_run(1.5)  # type: ignore[arg-type]
    schedule.maybe_run(int(np.int64(1)))
    for state in ({}, {"measured_steps": "1"}, {"measured_steps": [1.0]}, {"measured_steps": [-1]}, None):
        with pytest.raises(ValueError, match="the state of an EvalSchedule"):
            schedule.load_state_dict(state)  # type: ignore[arg-type]
    assert schedule.measured_steps == [1]


async def test_a_step_that_is_being_measured_is_not_measured_again_by_whoever_else_asks() -> None:
    class Slow(Scripted):
        async def run(self, config: EvalConfig, *, step: int = 0, resume: bool = True) -> EvalResult:
            await asyncio.sleep(0)
            return await super().run(config, step=step, resume=resume)

    harness = Slow(fails_at=frozenset({4}))
    schedule = EvalSchedule(harness, CONFIG, every_n_steps=2)
    results = await asyncio.gather(schedule.maybe_run_async(2), schedule.maybe_run_async(2), schedule.final_async(2))
    assert harness.steps == [2] and [result is None for result in results] == [False, True, True]
    with pytest.raises(RuntimeError, match="no environment"):
        await schedule.maybe_run_async(4)
    harness.fails_at = frozenset()
    assert await schedule.maybe_run_async(4) is not None, "an attempt that failed is over"
