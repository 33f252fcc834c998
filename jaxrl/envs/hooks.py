"""Finds what a user gave a run by its import path, and calls it where it cannot hold up the event loop.

In: `package.module:name`, or a function or a coroutine function with its arguments and a deadline. Out: what was found or returned, or an
error. It knows no rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxrl.blame import in_words
from jaxrl.envs.base import Score, TaskSpec
from jaxrl.errors import ConfigError, EnvError, GraderError, JaxrlError


def imported(import_path: str, where: str) -> Callable[..., Any]:
    """Return the class or function of an import path, looked for in the folder where the run is started, too.

    Args:
      import_path: `package.module:name`.
      where: the setting, for messages.

    Raises:
      ConfigError: the module cannot be imported, has no such name, or it is nothing that can be called.
    """
    module, _, name = import_path.partition(":")
    look_in_working_folder()
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        is_itself = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}.")
        remedy = "; it must be importable from where the run is started" if is_itself else ""
        raise ConfigError(f"{where} cannot be imported: {in_words(error)}{remedy}") from error
    if not callable(found):
        raise ConfigError(f"{where} is a {type(found).__name__}; name a class or a function")
    return found


def look_in_working_folder() -> None:
    """Let modules be imported from the folder where the run is started: as a console script, a program sees only its own folder."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


async def called(
    hook: Callable[..., Any], *args: Any, what: str, deadline_s: float, failing: type[JaxrlError] | None = None, thread: str = "hook"
) -> Any:
    """Call a hook.

    A coroutine function runs in the event loop. A plain function runs in a thread of its own, beside those of other rollouts; a thread
    cannot be killed, so what may hang belongs into worker processes (`envs.grading`).

    Args:
      hook: what is called.
      *args: its arguments.
      what: what it gives, for messages.
      deadline_s: how long a plain function is waited for, in seconds; its thread then goes on.
      failing: what the hook raises, and being late, become one of these, with the exception as its cause; None leaves exceptions as they
        are, and makes being late an `EnvError`, as it does with what no coroutine should raise, such as a KeyboardInterrupt.
      thread: name of the thread.

    Raises:
      Exception: what the hook raised, as `failing` says.
    """
    try:
        if inspect.iscoroutinefunction(hook):
            return await hook(*args)
        value, error = await _in_own_thread(hook, args, what, deadline_s, failing or EnvError, thread)
        if error is None:
            return await value if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as raised:
        error = raised
    # No coroutine can raise a StopIteration, and what means to end a thread or a generator would end the run.
    can_pass = isinstance(error, Exception | SystemExit | asyncio.CancelledError) and not isinstance(error, StopIteration)
    if isinstance(error, failing) if failing else can_pass:
        raise error
    raise (failing or EnvError)(f"{type(error).__name__}: {error}") from error


async def scored(score: Score, spec: TaskSpec, text: str, *, deadline_s: float) -> float | None:
    """Return what a scorer gives for a reply; see `called`.

    Raises:
      GraderError: it raised, or a plain function was not done after `deadline_s` seconds.
    """
    return await called(score, spec, text, what="the score", deadline_s=deadline_s, failing=GraderError, thread="score")


async def _in_own_thread(
    hook: Callable[..., Any], args: tuple[Any, ...], what: str, deadline_s: float, late: type[JaxrlError], thread: str
) -> tuple[Any, BaseException | None]:
    """Return what a plain function returned in a daemon thread of its own, and what it raised.

    In a pool, functions that never return would take every thread, and with them whatever else works there, and would
    keep the process from ending. Neither a future nor a coroutine can raise a StopIteration, so exceptions are returned.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = hook(*args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the run ended, and its loop with it, before the function returned
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=thread, daemon=True).start()
    if not (await asyncio.wait([done], timeout=deadline_s))[0]:
        raise late(f"{what} was not there after {deadline_s:g} s; its thread cannot be killed and goes on")
    return done.result()
