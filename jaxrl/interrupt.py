"""Ctrl-C while there is nothing to save: the process ends at once, in words.

In: the words. Out: exit code 130. Whoever has more to do on Ctrl-C, as a run with its checkpoint has, puts a handler of its own on top.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_ctrl_c(words: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with exit code 130, wherever the block has no handler of its own.

    Python's way, an exception, would come out of whatever is being imported or loaded: as a traceback, swallowed by a library, or as a
    crash of the interpreter that ends while another thread compiles.

    Args:
      words: the line that is left on standard error.
    """

    def end(number: int, frame: object) -> None:
        del number, frame
        with contextlib.suppress(OSError):
            os.write(2, f"{words}\n".encode())  # past Python's stream, which the signal may have caught in the middle of a write
        os._exit(130)

    # Who ignores the signal (`nohup`, a job in the background) or has a handler keeps that.
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
