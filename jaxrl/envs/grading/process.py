"""One worker process, seen from the thread that asks it: it is started, asked, and killed.

In: requests as bytes, each with a deadline. Out: rewards or texts, or words about what went wrong and where. Which requests, and
what for, is not known here; the other end is `worker`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping

from jaxrl.envs.grading import worker
from jaxrl.errors import GraderError

GRACE_S = 0.5
"""A process ends itself at its deadline, saying where it was; one that does not is killed so much later."""
LOOK_EVERY_S = 0.2
"""How often a process that is asked is looked at, whether it has ended without closing its pipes."""
END_DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 1 << 22
"""More than the longest text that a worker sends, whatever it is made of."""
MAX_TRACE_BYTES = 1 << 16
MAX_SHOWN_FRAMES = 3


class LostError(GraderError):
    """A worker process is of no use any more; the message says why."""


class LateError(LostError):
    """It was not done at the deadline."""


class RaisedError(GraderError):
    """The function raised; the message says where."""

    def __init__(self, words: str, headline: str) -> None:
        super().__init__(words)
        self.headline = headline
        """What it raised, in few words."""


class Process:
    """A worker process. One thread asks it and ends it; any may kill it.

    Args:
      environment: its environment variables.
      folder: its current folder.

    Raises:
      OSError: the system starts no process.
    """

    def __init__(self, environment: Mapping[str, str], folder: str) -> None:
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115, it is open as long as the process is
        self._popen = subprocess.Popen(
            # -P: the folder of the file, where names like `base` stand, is not searched for modules.
            [sys.executable, "-P", worker.__file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._trace,
            env=environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C does not reach it, and it can be killed with everything that it starts
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._requests, self._answers = self._popen.stdin, self._popen.stdout
        for stream in (self._requests, self._answers):
            os.set_blocking(stream.fileno(), False)
        self._lock = threading.Lock()

    def ask(self, request: bytes, deadline_s: float) -> float | str | None:
        """Send a request and wait for the answer: a finite number or None, or a text.

        Raises:
          RaisedError: the function raised.
          GraderError: the answer is another failure.
          LostError: there was no answer in time, or it is none, or there will be none.
        """
        end_s = time.monotonic() + deadline_s + GRACE_S
        try:
            self._send(request, end_s)
            answer = json.loads(self._receive(end_s))
        except TimeoutError:
            raise self._late(deadline_s) from None
        except (BrokenPipeError, EOFError):
            raise (self._late(deadline_s) if "Timeout (" in self._trace_text() else self._dead()) from None
        except ValueError:
            answer = None
        match answer:
            case {"failure": str(words), "raised": str(headline)}:
                raise RaisedError(_printable(words), _printable(headline))
            case {"failure": str(words)}:
                raise GraderError(_printable(words))
            case {"text": str(text)}:
                return _printable(text)
            case {"reward": None}:
                return None
            case {"reward": float(reward)} if math.isfinite(reward):
                return reward
        raise LostError("wrote into the pipe through which its worker process answers")

    def kill(self) -> None:
        """Kill the process and everything that it started, at once."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._requests.closed:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and give back what it held here."""
        self.kill()
        with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
            self._requests.close()
            self._answers.close()
            self._trace.close()
            self._popen.wait(END_DEADLINE_S)

    def _send(self, request: bytes, end_s: float) -> None:
        frame = memoryview(worker.LENGTH.pack(len(request)) + request)
        while frame:
            self._wait(self._requests.fileno(), select.POLLOUT, end_s)
            with contextlib.suppress(BlockingIOError):
                frame = frame[os.write(self._requests.fileno(), frame) :]

    def _receive(self, end_s: float) -> bytes:
        size = worker.LENGTH.unpack(self._read(worker.LENGTH.size, end_s))[0]
        if size > MAX_ANSWER_BYTES:
            raise ValueError
        return self._read(size, end_s)

    def _read(self, size: int, end_s: float) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(self._answers.fileno(), select.POLLIN, end_s)
            part = os.read(self._answers.fileno(), size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _wait(self, descriptor: int, events: int, end_s: float) -> None:
        ready = select.poll()
        ready.register(descriptor, events)
        while not ready.poll(1000 * min(LOOK_EVERY_S, max(0.0, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                raise TimeoutError
            if self._popen.poll() is not None:  # it forked, and the copy holds its pipe open
                raise EOFError

    def _late(self, deadline_s: float) -> LostError:
        return LateError(f"was not done after {deadline_s:g} s, and its worker process was killed{self._place()}")

    def _dead(self) -> LostError:
        try:
            code = self._popen.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return LostError("closed the pipe through which its worker process answers")
        if code >= 0:
            return LostError(f"ended its worker process, with exit code {code}{self._place()}")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return LostError(f"had its worker process ended by {name}{hint}{self._place()}")

    def _place(self) -> str:
        """Say where the function was when its process ended, if the process has left word."""
        return "".join(f"\n  {line.strip()}" for line in innermost_lines(self._trace_text()))

    def _trace_text(self) -> str:
        return os.pread(self._trace.fileno(), MAX_TRACE_BYTES, 0).decode(errors="replace")


def _printable(text: str) -> str:
    """Return a text without lone surrogates, which no file or tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def innermost_lines(trace: str) -> list[str]:
    r"""Return the innermost lines of the function in what `faulthandler` wrote.

    Example:
      >>> innermost_lines('Timeout!\nThread 0x1 (most recent call first):\n  File "rewards.py", line 3 in score\n')
      ['  File "rewards.py", line 3 in score']
    """
    threads = [part.splitlines() for part in re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", trace)]
    is_ours = re.compile(rf'  File "{re.escape(worker.__file__)}", line \d+ in (?:call|load)$').match
    scoring = [lines for lines in threads if any(is_ours(line) for line in lines)] or threads[-1:]
    frames = [line for line in scoring[-1] if line.startswith("  File ")]
    inside = frames[: next((index for index, line in enumerate(frames) if is_ours(line)), len(frames))]
    return [line for line in inside if "<frozen importlib" not in line][:MAX_SHOWN_FRAMES]
