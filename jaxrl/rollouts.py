"""`python -m jaxrl.rollouts DIR_OR_FILE [--step N] [--env NAME] [--task ID] [--best | --worst | --errors] [--num K] [--full]`: read them.

Prints rollouts of a run or an evaluation, finished or going on, as conversations: in colours on a terminal, plain in a pipe. Exit codes:
0 shown, 1 there is nothing to show or the file is broken, 2 the command line is wrong or no such run is there. What a conversation looks
like is `monitors.conversation`' work.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxrl.errors import ConfigError
from jaxrl.interrupt import ended_by_ctrl_c
from jaxrl.monitors.conversation import conversation
from jaxrl.monitors.messages import Messages, show_only_warnings
from jaxrl.monitors.selection import Choice, chosen, rollout_file

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Print rollouts, and return the process's exit code.

    Args:
      argv: the command line without the program's name; None takes the process's own.
    """
    flags = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    messages = Messages()
    show_only_warnings()
    with ended_by_ctrl_c("Interrupted."):
        try:
            path = rollout_file(flags.path, flags.step)
        except ConfigError as error:
            messages.failure(str(error))
            return EXIT_USAGE
        try:
            found = chosen(path, order=flags.order, env_name=flags.env, task_id=flags.task, num=flags.num)
        except (OSError, ValueError) as error:
            messages.failure(f"`{path}` cannot be read: {error}")
            return EXIT_FAILED
        if not found.records:
            messages.failure(found.nothing(path))
            return EXIT_FAILED
        _print(path, found, is_full=flags.full)
        return EXIT_OK


def _print(path: Path, found: Choice, *, is_full: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows fewer characters than Unicode has
    console = Console(highlight=False)
    console.print(found.title(path), style="dim", markup=False, emoji=False, soft_wrap=True)
    for record in found.records:
        console.print()
        for line in conversation(record, is_full=is_full, width=console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.rollouts", description="Read what was said in the rollouts of a run.")
    parser.add_argument(
        "path", type=Path, metavar="DIR_OR_FILE", help="a run folder, one file of its `rollouts` or `evals`, or the folder of an evaluation"
    )
    parser.add_argument("--step", type=int, metavar="N", help="rollouts of this step (default: the newest)")
    parser.add_argument("--env", metavar="NAME", help="rollouts of this environment only")
    parser.add_argument("--task", metavar="ID", help="rollouts of this task only")
    order = parser.add_mutually_exclusive_group()
    for name, words in (("best", "highest reward first"), ("worst", "lowest reward first"), ("errors", "rollouts that failed")):
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, help=words)
    parser.add_argument("--num", type=_positive, default=3, metavar="K", help="how many (default: 3)")
    parser.add_argument("--full", action="store_true", help="cut no text")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
