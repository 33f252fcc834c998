"""`jaxrl.orchestrator.reporter`: what the trainer says of a token is written with that token, and what was played is never lost."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from jaxrl.monitors.tokens import REASONS
from jaxrl.orchestrator.reporter import Reporter
from jaxrl.orchestrator.shipping import ShippedStep
from jaxrl.types import Bucket, Rollout, StepReport, TrainBatch, Training
from tests.builders import make_rollout
from tests.fakes import RecordingMonitors, ScriptedPool
from tests.orchestrator.wiring import Run, make_run

ROW_LENGTH = 20
"""Room for the prompt, of 16 tokens, and a short reply."""


def echo(batch: TrainBatch) -> list[np.ndarray]:
    """Return, as logprobs of each packed sample, numbers that name its tokens and their places."""
    found: dict[int, np.ndarray] = {}
    for micro_batch in batch.micro_batches:
        for row, segment in np.argwhere(micro_batch.sample_index >= 0):
            own = micro_batch.segment_ids[row] == segment + 1
            numbers = micro_batch.token_ids[row, own] + 1000 * micro_batch.position_ids[row, own]
            found[int(micro_batch.sample_index[row, segment])] = -numbers.astype(np.float32)
    return [found[index] for index in range(batch.num_samples)]


def some_lengthy(request, version) -> list[int]:
    """Return a reply that is longer than a row in some rollouts, and of ids of its own in each."""
    seed = request.sampling.seed
    return [65 + seed % 23] * (8 if seed % 3 == 0 else 3)


def is_trained(rollout: Rollout) -> bool:
    return rollout.bucket == Bucket.TRAINED


async def played(async_level: int = 0, **settings) -> Run:
    """Return a run of three steps with some overlong rollouts, whose trainer echoes its tokens."""
    run = make_run(
        pool=ScriptedPool(some_lengthy, latency=lambda request: request.sampling.seed % 5 / 500), row_length=ROW_LENGTH,
        async_level=async_level, **settings,
    )  # fmt: skip
    run.trainer.token_logprobs = echo
    await run.play()
    return run


@pytest.mark.parametrize("async_level", [0, 1])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
async def test_each_token_gets_the_trainers_own_number_whatever_was_dropped_or_cut(overlong: str, async_level: int) -> None:
    run = await played(async_level, overlong=overlong)
    rollouts = [rollout for step in run.monitors.rollouts.values() for rollout in step]
    trained = [rollout for rollout in rollouts if is_trained(rollout)]
    assert trained and any(len(r.samples[0]) > ROW_LENGTH for r in rollouts)
    assert any(len(r.samples[0]) > ROW_LENGTH for r in trained) == (overlong == "truncate")
    for rollout in trained:
        (sample,), (packed,) = rollout.samples, rollout.packed
        assert packed is not None and packed.trainer_logprobs is not None and rollout.training is Training.APPLIED
        assert packed.num_tokens == min(len(sample), ROW_LENGTH)
        expected = -(sample.token_ids + 1000 * np.arange(len(sample)))[: packed.num_tokens]
        assert packed.trainer_logprobs.tolist() == expected.tolist()
    assert all(not rollout.packed for rollout in rollouts if not is_trained(rollout))


@pytest.mark.parametrize("async_level", [0, 2])
async def test_when_the_trainer_dies_every_rollout_is_on_disk_once_with_what_is_known_of_it(async_level: int) -> None:
    run = make_run(max_steps=5, async_level=async_level, failure_at=3)
    run.trainer.token_logprobs = echo
    with pytest.raises(RuntimeError, match="the trainer broke at step 3"):
        await run.play()
    written = run.monitors.rollouts
    sent = [step for step, rollouts in sorted(written.items()) if any(is_trained(r) for r in rollouts)]
    assert sent[:3] == [1, 2, 3] and len(sent) <= 3 + async_level + 1
    training = {step: {r.training for r in written[step] if is_trained(r)} for step in sent}
    assert training == {step: {Training.APPLIED if step < 3 else Training.UNREPORTED} for step in sent}
    assert run.monitors.updated == [1, 2]
    assert len({id(r) for rollouts in written.values() for r in rollouts}) == sum(map(len, written.values()))


async def test_a_skipped_step_is_told_to_its_rollouts() -> None:
    rollouts = [make_rollout(), make_rollout(None)]
    rollouts[0].bucket, rollouts[1].bucket = Bucket.TRAINED, Bucket.UNSCORED
    ShippedStep(1, {}, rollouts).take(StepReport(step=1, version=1, skipped=True, metrics={}))
    assert [r.training for r in rollouts] == [Training.SKIPPED, Training.UNREPORTED]
    assert set(REASONS) >= {Training.SKIPPED, Training.UNREPORTED}


class DoneChannel:
    """A trainer that reported two steps and then broke."""

    async def next_report(self, deadline_s: float) -> StepReport:
        raise RuntimeError("the trainer broke at step 3")

    def pending_reports(self) -> list[StepReport]:
        return [StepReport(step=step, version=step, skipped=False, metrics={"loss/total": 0.5}) for step in (1, 2)]


async def test_a_report_that_came_just_before_the_failure_is_written_down() -> None:
    monitors = RecordingMonitors()
    reporter = Reporter(DoneChannel(), monitors, on_report=lambda step: None, deadline_s=60.0, clock=time.monotonic)
    rollouts = [make_rollout() for _ in range(3)]
    for step, rollout in enumerate(rollouts, 1):
        rollout.bucket = Bucket.TRAINED
        reporter.add(ShippedStep(step, {}, [rollout]))
    with pytest.raises(RuntimeError, match="broke at step 3"):
        await reporter.run()
    await reporter.close()
    assert monitors.updated == [1, 2] and [(step, row["loss/total"]) for step, row in monitors.steps] == [(1, 0.5), (2, 0.5)]
    assert [rollout.training for rollout in rollouts] == [Training.APPLIED, Training.APPLIED, Training.UNREPORTED]


class SilentChannel:
    """A trainer that never reports."""

    async def next_report(self, deadline_s: float) -> StepReport:
        await asyncio.sleep(deadline_s)
        raise AssertionError("the deadline is longer than the test")

    def pending_reports(self) -> list[StepReport]:
        return []


class SlowMonitors(RecordingMonitors):
    """Takes its time to write."""

    def log_rollouts(self, step, rollouts) -> None:
        time.sleep(0.05)
        super().log_rollouts(step, rollouts)


async def test_a_step_is_written_when_it_is_sent_however_long_the_trainer_takes_and_whoever_cancels_the_reporter() -> None:
    monitors = SlowMonitors()
    reporter = Reporter(SilentChannel(), monitors, on_report=lambda step: None, deadline_s=60.0, clock=time.monotonic)
    running = asyncio.create_task(reporter.run())
    for step in (1, 2, 3):
        reporter.add(ShippedStep(step, {}, [make_rollout()]))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await reporter.close()
    assert {step: len(rollouts) for step, rollouts in monitors.rollouts.items()} == {1: 1, 2: 1, 3: 1}
    assert monitors.updated == []


async def test_a_monitor_that_cannot_write_rollouts_fails_the_reporter() -> None:
    class Broken(RecordingMonitors):
        def log_rollouts(self, step, rollouts) -> None:
            raise ValueError("no paper")

    reporter = Reporter(SilentChannel(), Broken(), on_report=lambda step: None, deadline_s=60.0, clock=time.monotonic)
    reporter.add(ShippedStep(1, {}, []))
    with pytest.raises(ValueError, match="no paper"):
        await reporter.run()
    await reporter.close()
