"""The in-process channel: bounded, ordered, and every wait ends by a value, a deadline, a close or a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.errors import DeadlineError, RunFailedError
from jaxrl.transport import InProcessChannel
from jaxrl.types import StepReport, TrainBatch
from tests.builders import make_micro_batch

SOON_S = 0.05
LONG_S = 20.0


def batch_of(step: int) -> TrainBatch:
    m = make_micro_batch()
    return TrainBatch(step=step, micro_batches=[m], member_counts=None, num_samples=1, num_tokens=5, num_loss_tokens=3)


def report_of(step: int) -> StepReport:
    return StepReport(step=step, version=step, skipped=False, metrics={})


@pytest.fixture
async def in_thread() -> AsyncIterator[Callable[..., asyncio.Future]]:
    """Run a blocking call of the trainer side in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        loop = asyncio.get_running_loop()
        yield lambda fn, *args: loop.run_in_executor(pool, fn, *args)


async def until_waiting(channel: InProcessChannel, num_waiters: int) -> None:
    while len(channel._waiters) < num_waiters:
        await asyncio.sleep(0)


async def test_batches_arrive_in_order_and_their_reports_and_versions_come_back():
    channel = InProcessChannel(1)

    def trainer() -> list[int]:
        steps = []
        while (batch := channel.receive(LONG_S)) is not None:
            steps.append(batch.step)
            channel.announce(batch.step)
            channel.report(report_of(batch.step))
        return steps

    with ThreadPoolExecutor(1) as pool:
        steps = asyncio.get_running_loop().run_in_executor(pool, trainer)
        for step in range(1, 200):
            await channel.send(batch_of(step), LONG_S)
            if step % 3 == 0:
                assert await channel.next_version(step - 1, LONG_S) == step
        reports = [await channel.next_report(LONG_S) for _ in range(1, 200)]
        channel.close()
        assert await steps == [r.step for r in reports] == list(range(1, 200))


async def test_a_batch_is_passed_by_reference():
    channel = InProcessChannel(1)
    batch = batch_of(1)
    await channel.send(batch, LONG_S)
    assert channel.receive(LONG_S) is batch


async def test_a_full_channel_holds_the_sender_until_the_trainer_takes_a_batch(in_thread):
    channel = InProcessChannel(2)
    await channel.send(batch_of(1), LONG_S)
    await channel.send(batch_of(2), LONG_S)
    third = asyncio.create_task(channel.send(batch_of(3), LONG_S))
    await until_waiting(channel, 1)
    assert not third.done()
    assert (await in_thread(channel.receive, LONG_S)).step == 1
    await third
    assert [channel.receive(LONG_S).step for _ in range(2)] == [2, 3]


async def test_each_wait_that_runs_past_its_deadline_says_who_waited_for_what_and_how_long():
    channel = InProcessChannel(1)
    with pytest.raises(DeadlineError, match=r"the trainer waited 0.05 s for a train batch .* no version announced"):
        channel.receive(SOON_S)
    await channel.send(batch_of(1), LONG_S)
    channel.announce(4)
    with pytest.raises(
        DeadlineError, match=r"the orchestrator waited 0.05 s for room to send the batch of step 2; 1 of 1 batches"
    ):
        await channel.send(batch_of(2), SOON_S)
    with pytest.raises(
        DeadlineError, match=r"waited 0.05 s for the trainer's next step report; .* 1 sent and not reported"
    ):
        await channel.next_report(SOON_S)
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for a policy version above 4; .* newest version 4"):
        await channel.next_version(4, SOON_S)
    assert channel.receive(LONG_S).step == 1


async def test_the_newest_version_is_returned_at_once_and_never_goes_back():
    channel = InProcessChannel(1)
    channel.announce(0)
    assert await channel.next_version(-1, SOON_S) == 0
    channel.announce(3)
    channel.announce(2)
    assert await channel.next_version(0, SOON_S) == 3


async def test_a_failure_wakes_every_wait_on_both_sides_and_stays(in_thread):
    channel = InProcessChannel(1)
    await channel.send(batch_of(1), LONG_S)
    waits = [
        asyncio.create_task(channel.send(batch_of(2), LONG_S)),
        asyncio.create_task(channel.next_report(LONG_S)),
        asyncio.create_task(channel.next_version(0, LONG_S)),
    ]
    await until_waiting(channel, 3)
    await in_thread(channel.fail, KeyError("lost device"))
    for result in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(result, KeyError)
    channel.fail(ValueError("a later one"))
    with pytest.raises(KeyError, match="lost device"):
        channel.receive(LONG_S)
    with pytest.raises(KeyError, match="lost device"):
        await channel.next_report(LONG_S)


async def test_a_failure_of_the_asyncio_side_wakes_the_trainer(in_thread):
    channel = InProcessChannel(1)
    waiting = in_thread(channel.receive, LONG_S)
    await asyncio.sleep(SOON_S)
    channel.fail(RuntimeError("the orchestrator died"))
    with pytest.raises(RuntimeError, match="the orchestrator died"):
        await waiting


async def test_a_failure_that_is_itself_a_timeout_is_passed_on_unchanged():
    channel = InProcessChannel(1)
    channel.fail(TimeoutError("of the trainer"))
    with pytest.raises(TimeoutError, match="of the trainer") as caught:
        await channel.next_report(LONG_S)
    assert type(caught.value) is TimeoutError


async def test_closing_drains_queued_batches_and_their_reports_and_then_ends_both_sides(in_thread):
    channel = InProcessChannel(2)
    await channel.send(batch_of(1), LONG_S)
    await channel.send(batch_of(2), LONG_S)
    channel.close()
    with pytest.raises(RunFailedError, match="the batch of step 3 cannot be sent"):
        await channel.send(batch_of(3), LONG_S)
    assert [channel.receive(LONG_S).step for _ in range(2)] == [1, 2]
    assert channel.receive(LONG_S) is None
    first = asyncio.create_task(channel.next_report(LONG_S))
    await until_waiting(channel, 1)
    await in_thread(channel.report, report_of(1))
    assert (await first).step == 1
    channel.report(report_of(2))
    assert (await channel.next_report(LONG_S)).step == 2
    with pytest.raises(RunFailedError, match="no further report will come"):
        await channel.next_report(LONG_S)
    with pytest.raises(RunFailedError, match="no further policy version above 2 will come"):
        await channel.next_version(2, LONG_S)


async def test_closing_wakes_a_trainer_and_a_sender_that_wait(in_thread):
    channel = InProcessChannel(1)
    receiving = in_thread(channel.receive, LONG_S)
    await asyncio.sleep(SOON_S)
    channel.close()
    assert await receiving is None

    full = InProcessChannel(1)
    await full.send(batch_of(1), LONG_S)
    sending = asyncio.create_task(full.send(batch_of(2), LONG_S))
    await until_waiting(full, 1)
    full.close()
    with pytest.raises(RunFailedError, match="step 2 cannot be sent"):
        await sending


async def test_a_cancelled_send_leaves_no_batch_and_no_waiter_behind():
    channel = InProcessChannel(1)
    await channel.send(batch_of(1), LONG_S)
    sending = asyncio.create_task(channel.send(batch_of(2), LONG_S))
    await until_waiting(channel, 1)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert not channel._waiters
    assert channel.receive(LONG_S).step == 1
    with pytest.raises(DeadlineError):
        channel.receive(0.0)


async def test_waiting_on_another_loop_than_the_bound_one_is_an_error():
    channel = InProcessChannel(1)
    other = asyncio.new_event_loop()
    channel.bind_loop(other)
    with pytest.raises(RuntimeError, match="bound to another event loop"):
        await channel.next_report(LONG_S)
    other.close()


def test_the_trainer_can_report_after_the_loop_was_closed_in_the_middle_of_a_wait():
    channel = InProcessChannel(1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(channel.next_report(LONG_S))
    loop.run_until_complete(until_waiting(channel, 1))
    loop.close()
    channel.report(report_of(1))
    task._log_destroy_pending = False


def test_a_channel_holds_at_least_one_batch():
    with pytest.raises(ValueError, match="`capacity`=0"):
        InProcessChannel(0)
