"""`jaxrl.launch.side_by_side`: what signals do when there is nothing to save, and who gets a thread's result."""

import asyncio
import os
import signal
import threading

import pytest

from jaxrl.launch.side_by_side import ctrl_c, ended_at_once, in_thread


class Exited(BaseException):
    """Stands for the end of the process."""


def test_a_signal_outside_of_training_ends_the_process_at_once_and_sigterm_writes_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def end(code: int) -> None:
        done.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(os, "_exit", end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Exited), ended_at_once(lambda error: done.append(str(error)), lambda: done.append("terminal")):
        signal.raise_signal(signal.SIGTERM)
    assert done == ["the process was told to end (SIGTERM) before training began or after it ended", "terminal", "exit 143"]
    assert signal.getsignal(signal.SIGTERM) == before
    done.clear()
    with pytest.raises(Exited), ended_at_once(lambda error: done.append(str(error)), lambda: done.append("terminal")):
        signal.raise_signal(signal.SIGINT)
    assert done == ["terminal", "exit 130"], "whoever presses Ctrl-C needs no report"


async def test_handlers_are_put_back_after_training(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    with ended_at_once(lambda _: None, lambda: None):
        before = [signal.getsignal(number) for number in numbers]
        with ctrl_c(lambda: None, lambda _: None, lambda: None):
            assert signal.getsignal(signal.SIGINT) != before[0]
        assert [signal.getsignal(number) for number in numbers] == before


async def test_a_wait_that_is_given_up_leaves_the_thread_its_result() -> None:
    gate = threading.Event()
    future = in_thread(lambda: gate.wait(10) and None, "worker")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
    gate.set()
    assert future.result(10) is None
