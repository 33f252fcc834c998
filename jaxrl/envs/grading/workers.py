"""A few worker processes that call one function, such as one that scores replies; each can be killed and replaced.

In: requests, from any thread. Out: futures of what the function returned. A process is started when a request
finds all others busy, serves one request at a time, and is killed with everything that it started if it is not done at
the deadline. Waiting for a free process does not count. Nothing of a run is in a process: no device, socket or thread,
and no module but those that the function imports. It is no sandbox.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from jaxrl.envs.grading.process import LostError, Process
from jaxrl.errors import GraderError

LOAD_DEADLINE_S = 120.0
"""How long a process may take to import a function, whose module may import slow libraries."""
CLOSE_DEADLINE_S = 10.0


class Workers:
    """The processes of one function.

    Args:
      import_path: `package.module:function`, importable from the current folder or wherever this process finds modules.
      kwargs: keyword arguments of every call.
      deadline_s: how long one call may take, in seconds.
      num_workers: processes at most.
      environment: their environment variables.
      returns: `reward` for a function of (spec, text) that gives a finite number or None; `text` for any that gives a text, or a value
        that is written as JSON.

    Example:
      >>> workers = Workers("operator:eq", {}, deadline_s=5.0, num_workers=1, environment={})
      >>> workers.submit("a", "a").exception()
      GraderError('returned True (bool); expected a finite number, or None for a reply that it cannot score')
      >>> workers.close()
    """

    def __init__(
        self,
        import_path: str,
        kwargs: Mapping[str, Any],
        *,
        deadline_s: float,
        num_workers: int,
        environment: Mapping[str, str],
        returns: Literal["reward", "text"] = "reward",
    ) -> None:
        self._folder = str(Path.cwd())
        path = [entry or self._folder for entry in sys.path]
        setup = {"path": path if self._folder in path else [self._folder, *path], "import_path": import_path, "kwargs": dict(kwargs)}
        self._setup = pickle.dumps(setup | {"deadline_s": deadline_s, "load_deadline_s": LOAD_DEADLINE_S, "returns": returns})
        self._deadline_s = deadline_s
        self._num_workers = num_workers
        self._environment = environment
        self._requests: queue.SimpleQueue[tuple[bytes, Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[Process] = set()
        self._num_unanswered = 0
        self._is_closed = False

    def submit(self, /, *args: Any, **named: Any) -> Future[Any]:
        """Have the function called.

        Returns:
          What it returned, a finite number or None, or a text; or a GraderError: RaisedError if it raised, LostError if it ended its
          process, LateError if it was killed at the deadline, GraderError itself if it returned anything else.
        """
        future: Future[Any] = Future()
        request = pickle.dumps((args, named))
        with self._lock:
            if self._is_closed:
                raise GraderError("its worker processes are closed")
            self._num_unanswered += 1
            if self._num_unanswered > len(self._threads) < self._num_workers:
                self._threads.append(threading.Thread(target=self._serve, name=f"grader {len(self._threads)}", daemon=True))
                self._threads[-1].start()
            self._requests.put((request, future))
        return future

    def check(self) -> None:
        """Import the function in a process of its own, which then ends.

        Raises:
          GraderError: it cannot be imported, or does not take the arguments.
        """
        self._end(self._started())

    def close(self) -> None:
        """Kill every process; what waits for one fails. May be called twice."""
        with self._lock:
            self._is_closed = True
            threads, processes = list(self._threads), list(self._processes)
        for _ in threads:
            self._requests.put(None)
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join(CLOSE_DEADLINE_S)

    def _serve(self) -> None:
        """Answer requests, one after another, with one process after another."""
        process: Process | None = None
        while (item := self._requests.get()) is not None:
            request, future = item
            if future.set_running_or_notify_cancel():  # else nobody waits for it any more
                try:
                    process = process or self._started()
                    future.set_result(process.ask(request, self._deadline_s))
                except Exception as error:  # of whatever kind: this thread has to go on
                    if isinstance(error, LostError) or not isinstance(error, GraderError):
                        process = self._end(process)
                    future.set_exception(_grader_error(error))
            with self._lock:
                self._num_unanswered -= 1
        self._end(process)

    def _started(self) -> Process:
        process = None
        try:
            process = Process(self._environment, self._folder)
            with self._lock:
                self._processes.add(process)
                is_late = self._is_closed
            if is_late:
                raise LostError("its worker processes are closed")
            process.ask(self._setup, LOAD_DEADLINE_S)
        except (GraderError, OSError) as error:
            self._end(process)
            raise GraderError(f"cannot be loaded: {_grader_error(error)}") from None
        return process

    def _end(self, process: Process | None) -> None:
        if process is not None:
            process.end()
            with self._lock:
                self._processes.discard(process)


def _grader_error(error: Exception) -> GraderError:
    return error if isinstance(error, GraderError) else GraderError(f"{type(error).__name__}: {error}")
