"""The device thread: who goes next, who hears of a failure, and that nobody waits for ever."""

import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.devices import MAX_LEAD_S, DeviceThread, account, choose_next
from jaxrl.errors import DeadlineError, RunFailedError

WAIT_S = 10.0


@pytest.fixture
def device():
    thread = DeviceThread("test", deadline_s=WAIT_S)
    yield thread
    thread.stop(WAIT_S)


class ScriptedEngine:
    """Counts ticks, has work for as many as it was given, and takes `tick_s` of the given clock for each."""

    def __init__(self, num_ticks: int = 0, advance=lambda: None) -> None:
        self.todo = num_ticks
        self.done = 0
        self.advance = advance

    def has_work(self) -> bool:
        return self.todo > 0

    def tick(self) -> None:
        self.todo -= 1
        self.done += 1
        self.advance()


def choose(**ready: object) -> str | None:
    defaults = {
        "has_publish": False,
        "has_trainer": False,
        "has_engine": False,
        "has_tick": False,
        "trainer_lead_s": 0.0,
    }
    return choose_next(**(defaults | ready))


def test_publication_goes_before_everything_and_engine_jobs_before_ticks():
    assert choose(has_publish=True, has_trainer=True, has_engine=True, has_tick=True, trainer_lead_s=-9.0) == "publish"
    assert choose(has_trainer=True, has_engine=True, has_tick=True) == "engine"
    assert choose() is None
    assert choose(has_tick=True, trainer_lead_s=-1.0) == "tick"
    assert choose(has_trainer=True, trainer_lead_s=1.0) == "trainer"


def test_the_side_that_had_less_time_goes_next_and_a_tie_goes_to_the_trainer():
    assert choose(has_trainer=True, has_tick=True) == "trainer"
    assert choose(has_trainer=True, has_tick=True, trainer_lead_s=0.1) == "tick"
    assert choose(has_trainer=True, has_tick=True, trainer_lead_s=-0.1) == "trainer"


def test_a_debt_is_paid_back_while_the_other_side_is_away_but_no_credit_is_saved_up():
    assert account(0.3, "tick", 0.1, is_contended=False) == pytest.approx(0.2)
    assert account(0.3, "tick", 60.0, is_contended=False) == 0.0
    assert account(-0.3, "trainer", 60.0, is_contended=False) == 0.0
    assert account(0.3, "trainer", 1.0, is_contended=False) == 0.3
    assert account(0.3, "publish", 1.0, is_contended=True) == 0.3
    assert account(0.0, "trainer", 600.0, is_contended=True) == MAX_LEAD_S


@settings(max_examples=50, deadline=None)
@given(trainer_s=st.floats(0.01, 2.0), tick_s=st.floats(0.01, 2.0), has_gap=st.booleans())
def test_while_both_sides_have_work_each_gets_half_of_the_time_whatever_a_call_takes(trainer_s, tick_s, has_gap):
    lead_s, taken = 0.0, {"trainer": 0.0, "tick": 0.0}
    is_trainer_back = True
    for _ in range(400):
        choice = choose(has_trainer=is_trainer_back, has_tick=True, trainer_lead_s=lead_s)
        took_s = trainer_s if choice == "trainer" else tick_s
        lead_s = account(lead_s, choice, took_s, is_contended=is_trainer_back)
        taken[choice] += took_s
        # A trainer with a gap submits its next job only after the thread has looked once and found nothing of it.
        is_trainer_back = not (has_gap and choice == "trainer")
    if has_gap:
        # A gap always lets a tick in, which may be more than the engine's half; the trainer gets no more than its own.
        assert taken["trainer"] - taken["tick"] <= trainer_s + tick_s
    else:
        assert abs(taken["trainer"] - taken["tick"]) <= trainer_s + tick_s


def test_jobs_of_one_kind_run_in_order_on_one_thread_and_return_their_results(device):
    device.start()
    seen = []
    futures = [
        device.submit(lambda i=i: seen.append((i, threading.get_ident())) or i, kind="trainer") for i in range(5)
    ]
    assert [future.result(WAIT_S) for future in futures] == [0, 1, 2, 3, 4]
    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert len({ident for _, ident in seen}) == 1 and seen[0][1] != threading.get_ident()


def test_a_publication_overtakes_queued_micro_batches(device):
    order = []
    for name in ("micro_batch_1", "micro_batch_2"):
        device.submit(order.append, name, kind="trainer")
    last = device.submit(order.append, "publication", kind="publish")
    device.start()
    last.result(WAIT_S)
    device.run(order.append, "end", kind="trainer")
    assert order == ["publication", "micro_batch_1", "micro_batch_2", "end"]


def test_engine_ticks_run_between_the_micro_batches_of_a_long_step():
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    device = DeviceThread("test", deadline_s=WAIT_S, clock=lambda: now[0])
    engine = ScriptedEngine(1000, lambda: advance(0.1))
    ticks_before = []

    def micro_batch() -> None:
        ticks_before.append(engine.done)
        advance(0.4)

    device.attach_engine(engine.has_work, engine.tick)
    jobs = [device.submit(micro_batch, kind="trainer") for _ in range(4)]
    device.start()
    for job in jobs:
        job.result(WAIT_S)
    device.stop(WAIT_S)
    # Four ticks of 0.1 s after each micro-batch of 0.4 s (one more or less: sums of floats).
    assert ticks_before[0] == 0
    assert all(3 <= after - before <= 5 for before, after in itertools.pairwise(ticks_before))


def test_an_idle_thread_ticks_as_soon_as_it_is_woken(device):
    engine = ScriptedEngine()
    is_done = threading.Event()
    engine.advance = is_done.set
    device.attach_engine(engine.has_work, engine.tick)
    device.start()
    time.sleep(0.05)
    assert engine.done == 0
    engine.todo = 1
    started = time.monotonic()
    device.wake()
    assert is_done.wait(WAIT_S)
    assert time.monotonic() - started < 0.5, "woken only by its own look at the engine"


def test_the_exception_of_a_job_reaches_its_own_waiter_only(device):
    device.start()

    def broken() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        device.run(broken, kind="trainer")
    assert device.failure is None
    assert device.run(lambda: 7, kind="trainer") == 7


def test_the_exception_of_a_tick_ends_the_thread_and_reaches_every_present_and_later_waiter(device):
    error = ValueError("engine broke")

    def tick() -> None:
        raise error

    device.attach_engine(lambda: True, tick)
    # A tie goes to the trainer; after its first job the engine is owed time, so the tick comes before the other three.
    first = device.submit(time.sleep, 0.01, kind="trainer")
    waiting = [device.submit(pytest.fail, "ran after the failure", kind="trainer") for _ in range(3)]
    device.start()
    assert first.result(WAIT_S) is None
    assert {future.exception(WAIT_S) for future in waiting} == {error}
    assert device.failure is error
    with pytest.raises(ValueError, match="engine broke"):
        device.run(lambda: None, kind="publish")
    device.stop(WAIT_S)


def test_a_wait_past_its_deadline_says_who_waits_for_what_and_what_the_thread_is_doing():
    device = DeviceThread("test", deadline_s=0.2)
    may_go, is_running = threading.Event(), threading.Event()

    def compile_everything() -> None:
        is_running.set()
        may_go.wait(WAIT_S)

    def grad_step() -> None:
        pytest.fail("the caller had given up")

    device.start()
    device.submit(compile_everything, kind="engine")
    assert is_running.wait(WAIT_S)
    with pytest.raises(
        DeadlineError, match=r"0\.2 s for job trainer:grad_step; .*'test' is running engine:compile_everything"
    ):
        device.run(grad_step, kind="trainer")
    with pytest.raises(DeadlineError, match="compile_everything"):
        device.stop(0.05)
    may_go.set()
    device.stop(WAIT_S)


def test_stop_lets_the_running_job_end_cancels_the_others_and_may_be_called_twice(device):
    may_go, is_running = threading.Event(), threading.Event()

    def first() -> str:
        is_running.set()
        may_go.wait(WAIT_S)
        return "done"

    running, waiting = device.submit(first, kind="trainer"), device.submit(lambda: "never", kind="trainer")
    device.start()
    assert is_running.wait(WAIT_S)
    threading.Timer(0.05, may_go.set).start()
    device.stop(WAIT_S)
    device.stop(WAIT_S)
    assert running.result(WAIT_S) == "done"
    for future in (waiting, device.submit(lambda: "late", kind="publish")):
        with pytest.raises(RunFailedError, match="'test' has stopped"):
            future.result(WAIT_S)


def test_stop_before_start_fails_the_queued_jobs(device):
    queued = device.submit(lambda: None, kind="trainer")
    device.stop(WAIT_S)
    with pytest.raises(RunFailedError):
        queued.result(WAIT_S)


def test_a_job_that_asks_for_another_job_runs_it_at_once_instead_of_waiting_for_itself(device):
    device.start()
    assert device.run(lambda: device.run(lambda: 3, kind="publish") + 1, kind="trainer") == 4


def test_a_second_engine_is_refused(device):
    device.attach_engine(lambda: False, lambda: None)
    with pytest.raises(RunFailedError, match="already has an engine"):
        device.attach_engine(lambda: False, lambda: None)


def test_the_module_needs_no_jax():
    import subprocess
    import sys

    code = "import sys, jaxrl.devices; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
