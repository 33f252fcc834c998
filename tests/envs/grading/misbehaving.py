"""A reward function that does to its worker process what a reply tells it to; and others for single questions."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


class Sly:
    """A value whose own way to show itself breaks."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def act(spec, text):
    """Score a number with itself, and do what any other reply says."""
    if "pid_file" in spec:
        Path(spec["pid_file"]).write_text(str(os.getpid()))
    if "child_file" in spec:
        Path(spec["child_file"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    return ACTS[text]() if text in ACTS else float(text)


def spin():
    while True:
        pass


def hold_the_interpreter():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    re.match(r"(a+)+$", "a" * 60 + "b")  # in C, for ages, and no other thread of the process runs meanwhile


def say_much():
    line = "x" * 1023 + "\n"
    sys.stdout.write(line * 1024)
    sys.stderr.write(line * 1024)
    os.write(1, line.encode())
    subprocess.run(["echo", line], check=True)
    return 1.0


def fork():
    if os.fork() == 0:
        return 0.0  # the copy, whose answer must not count
    return 0.75


def leave_a_copy():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(4)


def forge():
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"\0\0\0\2{}")
        except OSError:
            continue
    return 1.0


async def think():
    await asyncio.sleep(0.01)
    return 0.25


ACTS = {
    "spin": spin,
    "sleep": lambda: time.sleep(600),
    "hold the interpreter": hold_the_interpreter,
    "raise": lambda: 1 / 0,
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "exit": lambda: sys.exit("bye"),
    "string": lambda: "yes",
    "nan": lambda: float("nan"),
    "bool": lambda: True,
    "huge": lambda: ["x" * 10_000_000] * 10_000_000,
    "sly": Sly,
    "int": lambda: 2,
    "none": lambda: None,
    "end": lambda: os._exit(3),
    "crash": lambda: ctypes.string_at(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "say much": say_much,
    "fork": fork,
    "leave a copy": leave_a_copy,
    "forge": forge,
    "think": think,
}


def modules(spec, text):
    """Give 1 if a module of this name is loaded, or the program's file has it."""
    return float(text in sys.modules or text == Path(sys.modules["__main__"].__file__).stem)


def longer(spec, text, *, than):
    """Give 1 for a reply that is longer."""
    return float(len(text) > than)
