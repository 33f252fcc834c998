"""`jaxrl.launch.side_by_side`: what signals do when there is nothing to save, and who gets a thread's result."""

import asyncio
import os
import signal
import socket
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


async def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_ends_a_loop_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def end(code: int) -> None:
        done.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = socket.socketpair()
    run = ctrl_c(lambda: done.append("stop"), done.append, lambda: done.append("abandon"))
    with ours, theirs, ended_at_once(lambda _: None, lambda: None), run:
        signal.raise_signal(signal.SIGINT)
        assert done == []
        await asyncio.sleep(0.05)
        (said, *rest) = done
        assert "Ctrl-C again" in said and rest == ["stop"]
        done.clear()
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        ours.settimeout(20)
        with pytest.raises(Exited):
            ours.recv(1)  # as a client that blocks; nobody writes
    assert done == ["abandon", "exit 130"]


async def test_a_report_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Exited

    monkeypatch.setattr(os, "_exit", end)
    held = threading.Lock()
    run = ctrl_c(lambda: None, lambda _: None, lambda: held.acquire() and None, abandon_deadline_s=0.05)
    with ended_at_once(lambda _: None, lambda: None), held, run:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Exited):
            signal.raise_signal(signal.SIGTERM)


async def test_a_wait_that_is_given_up_leaves_the_thread_its_result() -> None:
    gate = threading.Event()
    future = in_thread(lambda: gate.wait(10) and None, "worker")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
    gate.set()
    assert future.result(10) is None
