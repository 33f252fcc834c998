"""`jaxrl.launch.side_by_side`: what SIGTERM leaves behind when there is nothing to save."""

import os
import signal

import pytest

from jaxrl.launch.side_by_side import ended_by_sigterm


class Exited(BaseException):
    """Stands for the end of the process."""


def test_sigterm_outside_of_training_writes_a_report_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def end(code: int) -> None:
        done.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(os, "_exit", end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Exited), ended_by_sigterm(lambda error: done.append(str(error)), lambda: done.append("terminal")):
        signal.raise_signal(signal.SIGTERM)
    assert done == ["the process was told to end (SIGTERM) before training began or after it ended", "terminal", "exit 143"]
    assert signal.getsignal(signal.SIGTERM) == before
