"""Worker processes: whatever a reward function does to its own, nothing of it reaches another reply or this process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.envs.grading.workers import Workers
from jaxrl.errors import GraderError

MISBEHAVING = "tests.envs.grading.misbehaving"
DEADLINE_S = 1.0


def started(function: str = "act", *, deadline_s: float = DEADLINE_S, num_workers: int = 2) -> Workers:
    return Workers(f"{MISBEHAVING}:{function}", {}, deadline_s=deadline_s, num_workers=num_workers, environment=dict(os.environ))


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with contextlib.closing(started()) as some:
        yield some


def is_alive(pid: int) -> bool:
    """Say whether a process runs; one that ended and was not waited for does not."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc/self").exists() else True
    return False


def wait_for(condition, within_s: float = 20.0) -> bool:  # type: ignore[no-untyped-def]
    end_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("reply", "reward"), [("0.5", 0.5), ("int", 2.0), ("none", None), ("say much", 1.0), ("fork", 0.75), ("think", 0.25)]
)
def test_a_number_or_none_comes_back_whatever_else_the_function_does(
    workers: Workers, reply: str, reward: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert workers.submit({}, reply).result(20.0) == reward
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("raise", r"raised ZeroDivisionError: division by zero\n.*misbehaving.py, line \d+, in act: return ACTS.*\n.*: 1 / 0"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("exit", "raised SystemExit: bye"),
        ("string", r"returned 'yes' \(str\); expected a finite number, or None"),
        ("nan", r"returned nan \(float\); expected"),
        ("bool", r"returned True \(bool\)"),
        ("huge", r"returned \['xxxxx.*\.\.\.\] \(list\)"),
        ("sly", r"returned <Sly instance at \w+> \(Sly\)"),
        ("end", "ended its worker process, with exit code 3"),
        ("leave a copy", "ended its worker process, with exit code 4"),
        ("crash", r"had its worker process ended by SIGSEGV\n.*\n.*misbehaving.py\", line \d+ in <lambda>"),
        ("killed", "had its worker process ended by SIGKILL, as the system does when memory runs out"),
        ("forge", "wrote into the pipe through which its worker process answers"),
    ],
)
def test_anything_else_is_an_error_that_says_what_and_where(workers: Workers, reply: str, message: str) -> None:
    error = workers.submit({}, reply).exception(20.0)
    assert isinstance(error, GraderError)
    with pytest.raises(GraderError, match=f"^{message}"):
        raise error
    assert len(str(error)) < 2000


def test_what_never_returns_is_killed_at_its_deadline_with_what_it_started_and_says_where_it_was(tmp_path: Path) -> None:
    replies = ("spin", "sleep", "hold the interpreter")
    with contextlib.closing(started(num_workers=3)) as workers:
        begun_s = time.monotonic()
        lost = {reply: workers.submit({"child_file": str(tmp_path / reply)}, reply) for reply in replies}
        for reply, future in lost.items():
            message = str(future.exception(30.0))
            assert message.startswith("was not done after 1 s, and its worker process was killed\n  File"), reply
            assert "misbehaving.py" in message
        assert time.monotonic() - begun_s > DEADLINE_S
        assert wait_for(lambda: not any(is_alive(int((tmp_path / reply).read_text())) for reply in replies))
        assert workers.submit({}, "0.5").result(20.0) == 0.5


def test_two_hundred_replies_at_once_are_scored_and_one_that_hangs_costs_no_other() -> None:
    with contextlib.closing(started()) as workers:
        scores = [workers.submit({}, "sleep" if i == 20 else str(i)) for i in range(200)]
        # With two processes, most of them wait for longer than the deadline until their turn comes.
        failures = {i: str(error) for i, future in enumerate(scores) if (error := future.exception(60.0))}
        assert failures.keys() == {20} and "not done after 1 s" in failures[20]
        assert [future.result() for i, future in enumerate(scores) if i != 20] == [float(i) for i in range(200) if i != 20]


def test_waiting_for_a_free_process_does_not_count_and_who_waits_no_more_is_left_out(tmp_path: Path) -> None:
    with contextlib.closing(started(deadline_s=0.4, num_workers=1)) as workers:
        hanging = [workers.submit({}, "sleep") for _ in range(2)]
        given_up, last = workers.submit({"pid_file": str(tmp_path / "pid")}, "1"), workers.submit({}, "0.5")
        assert given_up.cancel()
        assert last.result(30.0) == 0.5
        assert all(future.exception() for future in hanging) and not (tmp_path / "pid").exists()


def test_closing_kills_what_runs_and_fails_what_waits(tmp_path: Path) -> None:
    workers = started(deadline_s=600.0, num_workers=1)
    running = workers.submit({"pid_file": str(tmp_path / "pid")}, "hold the interpreter")
    waiting = workers.submit({}, "1")
    assert wait_for((tmp_path / "pid").exists)
    workers.close()
    workers.close()
    assert isinstance(running.exception(1.0), GraderError) and isinstance(waiting.exception(1.0), GraderError)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(GraderError, match="closed"):
        workers.submit({}, "1")


def test_scores_and_lost_processes_leave_no_descriptor_and_no_thread_behind() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/dev/fd")), threading.active_count()

    before = held()
    with contextlib.closing(started(num_workers=1)) as workers:
        workers.submit({}, "0.5").result(20.0)
        with_one = held()
        for reply in ("0.5", "raise", "end", "fork", "crash") * 4:
            workers.submit({}, reply).exception(20.0)
        workers.submit({}, "0.5").result(20.0)
        assert held() == with_one
    assert held() == before


ORPHANS = """
import os, sys, time
from jaxrl.envs.grading.workers import Workers
workers = Workers("tests.envs.grading.misbehaving:act", {}, deadline_s=float(sys.argv[1]), num_workers=3, environment=dict(os.environ))
for reply in sys.argv[3:]:
    workers.submit({"pid_file": f"{sys.argv[2]}/{reply}"}, reply)
time.sleep(600)
"""


def test_processes_end_with_the_one_that_started_them_even_if_that_is_killed(tmp_path: Path) -> None:
    replies = ("0.5", "sleep", "hold the interpreter")
    # The interpreter that is held lets no thread see the end; it goes at its own deadline.
    with subprocess.Popen([sys.executable, "-c", ORPHANS, "1", str(tmp_path), *replies]) as parent:
        try:
            assert wait_for(lambda: all((tmp_path / reply).exists() and (tmp_path / reply).read_text() for reply in replies))
        finally:
            parent.send_signal(signal.SIGKILL)
    pids = [int((tmp_path / reply).read_text()) for reply in replies]
    assert wait_for(lambda: not any(is_alive(pid) for pid in pids), within_s=10.0)


def test_a_process_holds_nothing_of_the_run() -> None:
    with contextlib.closing(started("modules", num_workers=1)) as workers:
        found = {name: workers.submit({}, name).result(20.0) for name in ("jax", "numpy", "jaxrl", "__main__", "worker")}
    assert found == {"jax": 0.0, "numpy": 0.0, "jaxrl": 0.0, "__main__": 1.0, "worker": 1.0}
