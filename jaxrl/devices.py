"""The one thread that owns every JAX call on a device set, and the pure rule that says what it does next.

In: callables (`run`, `submit`) from the trainer and from publication, and one engine's `tick`. Out: their results, or
the failure that ended the thread. Publication goes first; while a trainer job and an engine tick are both ready, each
side gets the same share of the thread's time. Knows neither engine, trainer nor JAX, and never cuts a call short: a job
or a tick is the unit of interleaving.

    who waits             for what                       unblocked by                  bounded by
    the device thread     a job, engine work or `stop`   `submit`, `wake`, `stop`      `IDLE_S`, then it looks again
    a caller of `run`     the result of its job          the device thread             the thread's `deadline_s`
    a caller of `stop`    the call that is running       the end of that call          the deadline it passes
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from jaxrl.blame import blame
from jaxrl.errors import DeadlineError, RunFailedError

T = TypeVar("T")

Kind = Literal["publish", "trainer", "engine"]
"""Who asks: `publish` goes first, `trainer` shares with ticks, `engine` is engine work other than ticks (warm-up)."""

Choice = Literal["publish", "trainer", "engine", "tick"]
"""What the device thread does next: the oldest job of a kind, or one engine tick."""

IDLE_S = 1.0
"""An idle thread asks the engine for work this often even if nobody woke it."""

MAX_LEAD_S = 5.0
"""One very long call (a compilation) is paid back for this long at most."""

DEADLINE_S = 3600.0
"""How long `run` waits for a result by default: the first compilation of a large model takes long."""


def choose_next(
    *, has_publish: bool, has_trainer: bool, has_engine: bool, has_tick: bool, trainer_lead_s: float
) -> Choice | None:
    """Say what the device thread does next.

    Publication first (everybody waits for new weights), then engine jobs (they stand between a request and its ticks).
    When a trainer job and a tick are both ready, the side that has had less of the thread's time goes, so a long
    gradient step does not starve short ticks nor the reverse; a tie goes to the trainer.

    Args:
      has_publish: a `publish` job is queued.
      has_trainer: a `trainer` job is queued.
      has_engine: an `engine` job is queued.
      has_tick: the engine has work for a tick.
      trainer_lead_s: seconds that the trainer has had more than the engine while both wanted the thread; see `account`.

    Returns:
      The choice, or None when there is nothing to do.

    Example:
      >>> choose_next(has_publish=False, has_trainer=True, has_engine=False, has_tick=True, trainer_lead_s=0.4)
      'tick'
    """
    if has_publish:
        return "publish"
    if has_engine:
        return "engine"
    if has_trainer and has_tick:
        return "trainer" if trainer_lead_s <= 0 else "tick"
    if has_trainer:
        return "trainer"
    return "tick" if has_tick else None


def account(trainer_lead_s: float, choice: Choice, taken_s: float, *, is_contended: bool) -> float:
    """Return the trainer's lead after `choice` took the thread for `taken_s`.

    Time that nobody else wanted pays a debt back but gives no credit: a trainer that submits its next micro-batch a
    moment after the last one still owes the ticks that waited, and an engine that was alone for an hour does not bar
    the trainer for the next one.

    Args:
      trainer_lead_s: the lead before.
      choice: what ran; only `trainer` and `tick` count.
      taken_s: how long it ran.
      is_contended: the other side was ready too when the choice was made.

    Returns:
      The lead after, within +-`MAX_LEAD_S`.

    Example:
      >>> account(0.0, "trainer", 2.0, is_contended=True), account(0.5, "tick", 2.0, is_contended=False)
      (2.0, 0.0)
    """
    if choice == "trainer":
        lead_s = trainer_lead_s + taken_s
        lead_s = lead_s if is_contended else min(lead_s, max(trainer_lead_s, 0.0))
    elif choice == "tick":
        lead_s = trainer_lead_s - taken_s
        lead_s = lead_s if is_contended else max(lead_s, min(trainer_lead_s, 0.0))
    else:
        lead_s = trainer_lead_s
    return max(-MAX_LEAD_S, min(MAX_LEAD_S, lead_s))


@dataclass(slots=True)
class _Job:
    name: str
    call: Callable[[], Any]
    future: concurrent.futures.Future[Any]


class DeviceThread:
    """Runs jobs and engine ticks one at a time, all on one thread.

    A job's own exception goes to whoever waits for that job and nobody else. An exception of an engine tick is a
    failure of the whole device set: it is kept in `failure`, ends the thread, and is raised to every present and future
    waiter.

    Example:
      >>> device = DeviceThread("doctest")
      >>> device.start()
      >>> device.run(lambda a, b: a + b, 1, 2, kind="trainer")
      3
      >>> device.stop(deadline_s=5.0)
    """

    def __init__(
        self, name: str = "device", *, deadline_s: float = DEADLINE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._deadline_s = deadline_s
        self._clock = clock
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._changed = threading.Condition()
        self._jobs: dict[Kind, deque[_Job]] = {kind: deque() for kind in get_args(Kind)}
        self._has_work: Callable[[], bool] | None = None
        self._tick: Callable[[], None] | None = None
        self._is_awake = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._running: tuple[str, float] | None = None
        self._trainer_lead_s = 0.0

    @property
    def failure(self) -> BaseException | None:
        """The first exception of an engine tick, which ended the thread; None while all is well."""
        return self._failure

    def start(self) -> None:
        """Start the thread; jobs submitted earlier run now."""
        self._thread.start()

    def attach_engine(self, has_work: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Let an engine share the thread.

        Args:
          has_work: says whether a tick would do anything; called on the device thread, must be quick and thread-safe.
          tick: advances the engine by one unit of work; called on the device thread only.

        Raises:
          RunFailedError: an engine is attached already; one device set serves one engine.
        """
        with self._changed:
            if self._tick is not None:
                raise RunFailedError(
                    f"device thread {self.name!r} already has an engine; one device set serves one engine"
                )
            self._has_work, self._tick = has_work, tick
        self.wake()

    def wake(self) -> None:
        """Tell the thread that the engine may have work; callable from any thread."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def submit(self, fn: Callable[..., T], *args: Any, kind: Kind) -> concurrent.futures.Future[T]:
        """Queue a call and return at once.

        Args:
          fn: what to call on the device thread; its `__name__` appears in messages about stalls.
          args: its positional arguments.
          kind: who asks, see `Kind`.

        Returns:
          A future of the call's result. After a failure or `stop` it already holds that exception.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._changed:
            ended = self._ended()
            if ended is None:
                self._jobs[kind].append(
                    _Job(f"{kind}:{getattr(fn, '__name__', type(fn).__name__)}", lambda: fn(*args), future)
                )
                self._changed.notify_all()
        if ended is not None:
            future.set_exception(ended)
        return future

    def run(self, fn: Callable[..., T], *args: Any, kind: Kind) -> T:
        """Call `fn(*args)` on the device thread and wait for its result; on the device thread itself, call it at once.

        Args:
          fn: what to call.
          args: its positional arguments.
          kind: who asks, see `Kind`.

        Returns:
          What `fn` returned.

        Raises:
          DeadlineError: no result within the thread's deadline; the message says what the thread is doing.
          Exception: whatever `fn` raised, or the `failure` that ended the thread.
        """
        if threading.current_thread() is self._thread:
            return fn(*args)
        future = self.submit(fn, *args, kind=kind)
        concurrent.futures.wait([future], timeout=self._deadline_s)
        if not future.done():
            future.cancel()
            name = getattr(fn, "__name__", type(fn).__name__)
            late = DeadlineError(f"waited {self._deadline_s:g} s for job {kind}:{name}; {self.describe()}")
            raise blame(late, "device thread")
        return future.result()

    def describe(self) -> str:
        """Return one line that says what the thread is doing and who waits for it."""
        with self._changed:
            running, waiting = self._running, [job.name for jobs in self._jobs.values() for job in jobs]
        doing = f"running {running[0]} for {self._clock() - running[1]:.1f} s" if running else "idle"
        return f"device thread {self.name!r} is {doing}; waiting jobs: {', '.join(waiting) or 'none'}"

    def stop(self, deadline_s: float) -> None:
        """Let the running call end, cancel queued jobs, and end the thread; a second call does nothing.

        Args:
          deadline_s: how long the running call may still take.

        Raises:
          DeadlineError: the call did not end in time; the message names it. The thread then ends with the process.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise DeadlineError(f"waited {deadline_s:g} s for the device thread to stop; {self.describe()}")
        self._fail_queued(self._ended())

    def _ended(self) -> BaseException | None:
        if self._failure is not None:
            return self._failure
        return RunFailedError(f"device thread {self.name!r} has stopped") if self._is_stopping else None

    def _loop(self) -> None:
        while True:
            try:
                # Outside our lock: the engine answers under its own lock, and holds that one while it calls `wake`.
                has_tick = self._has_work() if self._has_work is not None else False
            except BaseException as failure:
                return self._fail(failure)
            with self._changed:
                if self._is_stopping:
                    break
                is_contended = has_tick and bool(self._jobs["trainer"])
                choice, job = self._take(has_tick)
                if choice is None:
                    if not self._is_awake:
                        self._changed.wait(IDLE_S)
                    self._is_awake = False
                    continue
                started = self._clock()
                self._running = (job.name if job else "engine:tick", started)
            failure = self._do(job)
            with self._changed:
                self._running = None
                self._trainer_lead_s = account(
                    self._trainer_lead_s, choice, self._clock() - started, is_contended=is_contended
                )
            if failure is not None:
                return self._fail(failure)
        self._fail_queued(self._ended())

    def _take(self, has_tick: bool) -> tuple[Choice | None, _Job | None]:
        """Choose under the lock, and take the chosen job off its queue."""
        choice = choose_next(
            has_publish=bool(self._jobs["publish"]),
            has_trainer=bool(self._jobs["trainer"]),
            has_engine=bool(self._jobs["engine"]),
            has_tick=has_tick,
            trainer_lead_s=self._trainer_lead_s,
        )
        return choice, None if choice is None or choice == "tick" else self._jobs[choice].popleft()

    def _do(self, job: _Job | None) -> BaseException | None:
        """Run one job, or one tick when there is none; return the exception of a tick."""
        if job is None:
            assert self._tick is not None, "a tick was chosen without an engine"
            try:
                self._tick()
            except BaseException as raised:
                return raised
        elif job.future.set_running_or_notify_cancel():
            try:
                result = job.call()
            except BaseException as raised:
                job.future.set_exception(raised)
            else:
                job.future.set_result(result)
        return None

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
        self._fail_queued(failure)

    def _fail_queued(self, failure: BaseException | None) -> None:
        with self._changed:
            jobs = [job for queue in self._jobs.values() for job in queue]
            for queue in self._jobs.values():
                queue.clear()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(failure)
