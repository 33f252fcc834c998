"""What a worker process runs: one function, called for one request after another, until it is killed.

In, on standard input: frames of pickled requests, the first of which says what to import. Out, on standard output:
frames of JSON, one a request, each a reward, a text, or words about what went wrong. Nothing of jaxrl is imported here, so the
process starts at once and holds no device; pickles go to it and never come from it, because whatever ran in it may have
written them. See `workers` for the other end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import math
import numbers
import os
import pickle
import queue
import reprlib
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
"""What stands before a frame: the number of its bytes."""
MAX_SHOWN_FRAMES = 3
MAX_MESSAGE_CHARS = 2000
MAX_TEXT_CHARS = 1 << 18
"""A longer text is not sent: more than any window holds, and it would be read into the memory of the run."""


def main() -> None:
    """Serve requests until the other end closes its side, which also is what its death does."""
    requests, answers, trace = os.fdopen(os.dup(0), "rb"), os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what a function prints must not be taken for an answer, nor reach the terminal
        os.dup2(nowhere, descriptor)
    faulthandler.enable(trace)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, inbox), name="receive", daemon=True).start()
    setup = pickle.loads(inbox.get())
    owner = os.getpid()

    def answered(work: Callable[[], dict[str, Any]], deadline_s: float) -> None:
        # Says where the function is when its time is up, even if it never lets another thread run, and ends the process:
        # the other end would, but may be dead.
        faulthandler.dump_traceback_later(deadline_s, exit=True, file=trace)
        answer = work()
        if os.getpid() != owner:  # the function forked, and this is the copy
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        _answer(answers, answer)

    answered(lambda: load(setup), setup["load_deadline_s"])
    while True:
        request = inbox.get()
        answered(lambda request=request: call(setup["function"], request, setup["kwargs"], setup["returns"]), setup["deadline_s"])


def load(setup: dict[str, Any]) -> dict[str, Any]:
    """Import the function that the setup names, into `setup["function"]`; return an answer with or without a failure."""
    try:
        sys.path[:] = setup["path"]
        module, _, name = setup["import_path"].partition(":")
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name!r} is no function, it is {shown(function)}")
        if setup["returns"] == "reward" and (unfit := misfit(function, setup["kwargs"])):
            return {"failure": unfit}
    except ModuleNotFoundError as error:
        is_itself = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return {"failure": told(error) + ("\nIt must be importable from where the run is started" if is_itself else "")}
    except BaseException as error:
        return {"failure": told(error)}
    setup["function"] = function
    return {"reward": None}


def misfit(function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """Say why a function does not take (spec, text, **kwargs); empty if it does.

    Example:
      >>> misfit(lambda spec, text, *, limit=9: 1.0, {"limits": 3})
      "got an unexpected keyword argument 'limits'; it is called with (spec, text, limits=...) and takes (spec, text, *, limit=9)"
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return ""
    try:
        signature.bind({}, "", **kwargs)
    except TypeError as error:
        given = ", ".join(["spec", "text", *(f"{name}=..." for name in kwargs)])
        return f"{error}; it is called with ({given}) and takes {signature}"
    return ""


def call(function: Callable[..., Any], request: bytes, kwargs: dict[str, Any], returns: str = "reward") -> dict[str, Any]:
    """Call the function with the arguments in the pickle of (positional, named); return an answer.

    Example:
      >>> call(lambda spec, text: len(text), pickle.dumps((({}, "four"), {})), {})
      {'reward': 4.0}
      >>> call(lambda spec, text: text, pickle.dumps((({}, "four"), {})), {})
      {'failure': "returned 'four' (str); expected a finite number, or None for a reply that it cannot score"}
      >>> call(lambda place: {"in": place}, pickle.dumps(((), {"place": "Ghent"})), {}, "text")
      {'text': '{"in": "Ghent"}'}
    """
    try:
        args, named = pickle.loads(request)
        value = function(*args, **named, **kwargs)
        if inspect.iscoroutine(value):
            import asyncio  # here, since few functions need it and it doubles the time that a process takes to start

            value = asyncio.run(value)
        return reward_answer(value) if returns == "reward" else text_answer(value)
    except BaseException as error:
        return {"failure": f"raised {told(error)}", "raised": headline(error)}


def reward_answer(value: object) -> dict[str, Any]:
    """Return the answer to a request for a reward."""
    number = None if value is None else finite(value)
    if value is not None and number is None:
        return {"failure": f"returned {shown(value)}; expected a finite number, or None for a reply that it cannot score"}
    return {"reward": number}


def text_answer(value: object) -> dict[str, Any]:
    """Return the answer to a request for a text: a text as it is, anything else as JSON."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return {"failure": f"returned {shown(value)}; expected a text, or a value that can be written as JSON"}
    if len(text) > MAX_TEXT_CHARS:
        return {"failure": f"returned {len(text)} characters; at most {MAX_TEXT_CHARS} are read"}
    return {"text": text}


def finite(value: object) -> float | None:
    """Return a real finite number as a float, and None for anything else; a bool is no number here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Return a value in few words, whatever its own way to show itself does."""
    try:
        words = reprlib.repr(value)
    except BaseException as error:
        words = f"a value that cannot be shown ({type(error).__name__})"
    return f"{words[:200]} ({type(value).__name__})"


def headline(error: BaseException) -> str:
    """Return an exception in few words."""
    try:
        words = f"{type(error).__name__}: {error}"
    except BaseException:
        words = type(error).__name__
    return words[:MAX_MESSAGE_CHARS]


def told(error: BaseException) -> str:
    """Return an exception with the innermost lines that it passed through, without those of this file."""
    words = headline(error)
    with contextlib.suppress(Exception):
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in (__file__, importlib.__file__)]
        frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
        places = [f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-MAX_SHOWN_FRAMES:]]
        words = "\n  ".join([words, *places])
    return words[: 2 * MAX_MESSAGE_CHARS]


def _receive(requests: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    """Pass requests on; when there can be no more, end the process with everything that was started in it."""
    with contextlib.suppress(OSError, struct.error):
        while True:
            size = LENGTH.unpack(requests.read(LENGTH.size))[0]
            inbox.put(requests.read(size))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _answer(answers: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    frame = memoryview(LENGTH.pack(len(body)) + body)
    while frame:
        frame = frame[os.write(answers, frame) :]


if __name__ == "__main__":
    main()
