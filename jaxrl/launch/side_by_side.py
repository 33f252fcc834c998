"""Both arms side by side: one in the event loop, one in a thread of its own, ended together.

In: an awaitable and a blocking call. Out: the first failure of the two, with both ended. The first Ctrl-C asks for an
orderly stop, the second ends the process. It knows nothing of what either arm does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future

from jaxrl.blame import blame
from jaxrl.errors import DeadlineError, RunFailedError
from jaxrl.launch.arrays import STOP_DEADLINE_S
from jaxrl.launch.standstill import STANDSTILL_S, StandstillWatch

logger = logging.getLogger(__name__)

ABANDON_DEADLINE_S = 5.0
"""How long a process that is told to end a second time stays to say why."""


def in_thread(call: Callable[[], None], name: str) -> Future[None]:
    """Run a blocking call in a thread of its own; the default pool is for short work."""
    future: Future[None] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()  # from here on nobody who stops waiting can cancel it
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


async def side_by_side(playing: Awaitable[None], training: Future[None], *, standstill_s: float = STANDSTILL_S) -> None:
    """Wait for both arms to end, and raise what the asyncio arm raised, or else what the trainer raised.

    A trainer that fails reaches the asyncio arm through the channel, so that one's failure is the first; what follows from it
    on the other side is logged.

    Args:
      playing: the asyncio arm.
      training: the trainer, in its thread.
      standstill_s: say where the event loop stands once it has not ticked for so long, in seconds.
    """
    try:
        with StandstillWatch(standstill_s):
            await playing
    except BaseException as first:
        try:
            await _settle(training)
        except Exception as error:
            if error is not first:
                logger.error("the trainer failed too: %s: %s", type(error).__name__, error)
        raise
    await _settle(training)


async def _settle(training: Future[None]) -> None:
    """Wait for the trainer to end; its own failure has reached the orchestrator through the channel already."""
    timer = asyncio.timeout(STOP_DEADLINE_S)
    try:
        async with timer:
            await asyncio.wrap_future(training)
    except TimeoutError as error:
        if not timer.expired():  # the trainer's own failure may itself be a timeout
            raise
        late = DeadlineError(f"the trainer did not end within {STOP_DEADLINE_S:g} s after the orchestrator did")
        raise blame(late, "trainer") from error


@contextlib.contextmanager
def ended_at_once(write_report: Callable[[BaseException], object], abandon: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process at once: there is nothing yet that an orderly stop could save.

    An exception would have to wait for the device thread, and XLA compiles for minutes without listening to anybody. SIGTERM leaves a
    report, since nobody may be watching. Inside the block `ctrl_c` may take the signals over for a while.
    """

    def end(number: int, frame: object) -> None:
        del frame
        try:
            if number == signal.SIGTERM:
                write_report(RunFailedError("the process was told to end (SIGTERM) before training began or after it ended"))
            logger.warning("told to end (%s) outside of training: no step was lost", signal.Signals(number).name)
            abandon()
        finally:  # a terminal that is gone must not keep the process
            os._exit(128 + number)

    with _restoring_signals() as signals:
        for number in signals:
            signal.signal(number, end)
        yield


@contextlib.contextmanager
def _restoring_signals() -> Iterator[tuple[signal.Signals, ...]]:
    """Yield the signals that a block may handle, and put their handlers back; none in another thread than the main one."""
    # Signals can be handled in the main thread only; a run inside another program's thread goes without.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield tuple(before)
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def ctrl_c(
    request_stop: Callable[[], None],
    say: Callable[[str], None],
    abandon: Callable[[], None],
    *,
    abandon_deadline_s: float = ABANDON_DEADLINE_S,
) -> Iterator[None]:
    """Let the first Ctrl-C (or SIGTERM) stop the run in order, and the second one end the process at once, even if the loop stands still.

    Args:
      request_stop: asks for the stop; called in the event loop.
      say: shows a line; likewise.
      abandon: writes what is to be left behind; called in a thread of its own.
      abandon_deadline_s: how long the process stays for that, in seconds.
    """
    loop = asyncio.get_running_loop()
    is_asked = False
    num_signals = 0

    def stop() -> None:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            say("stopping: finishing the running step and saving; Ctrl-C again ends at once")
            request_stop()

    def count(number: int, frame: object) -> None:
        nonlocal num_signals
        del number, frame
        num_signals += 1
        if num_signals < 2:
            return
        try:
            # In another thread: the signal may have caught this one with a lock in its hands that the report needs.
            leaving = threading.Thread(target=abandon, name="abandon", daemon=True)
            leaving.start()
            leaving.join(abandon_deadline_s)
        finally:
            os._exit(130)

    with _restoring_signals() as signals:
        for number in signals:
            # The loop is woken by each signal and calls `stop`. Python calls `count` between two steps of the main thread, or when a
            # signal breaks into its wait for a socket, whatever the loop does.
            loop.add_signal_handler(number, stop)
            signal.signal(number, count)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
