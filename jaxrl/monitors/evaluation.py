"""An evaluation on a terminal: how far it is, and what came of it as tables.

In: phases and counts while it runs; its scores and rows at the end. Out: a bar and lines on standard error, tables on the console that is
given. It computes no score.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Row = Mapping[str, Any]

_LINE_EVERY_S = 30.0
"""A log is told how far an evaluation is this often at most."""
_MAX_KINDS = 40
"""Kinds of tasks that a table lists."""


class EvalTerminal:
    """Shows how far an evaluation is: a bar for a person, a line now and then for a log.

    Args:
      console: standard error; the result has the other stream.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._told_s = time.monotonic()
        self._has_begun = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show it for the body of the `with`; warnings are printed above the bar."""
        if not self._console.is_terminal:
            yield
            return
        words = TextColumn("{task.description}")
        columns = (SpinnerColumn(), words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=self._console, transient=True)
        handlers = [
            h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler) and h.stream in (sys.stdout, sys.stderr)
        ]
        moved = [(handler, handler.stream) for handler in handlers]
        with bar:
            self._bar = bar
            for handler, _ in moved:  # one made earlier holds the real stream, and would write across the bar
                handler.setStream(sys.stderr)
            try:
                yield
            finally:
                self._bar = None
                for handler, stream in moved:
                    handler.setStream(stream)

    def phase(self, text: str) -> None:
        """Say what is being done."""
        if self._bar is None:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)
        elif self._task is None:
            self._task = self._bar.add_task(text, total=None)
        else:
            self._bar.update(self._task, description=text)

    def progress(self, num_done: int, num_planned: int) -> None:
        """Show how many episodes are over; those that are when it begins were played earlier."""
        if not self._has_begun:
            self._has_begun = True
            if num_done:
                self._console.print(
                    f"{num_done} of {num_planned} episodes are there already, and are not played again", style="dim", markup=False
                )
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=None)
            self._bar.update(self._task, description="playing", completed=num_done, total=num_planned)
        elif num_done == num_planned or time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            self._console.print(f"{num_done} of {num_planned} episodes", style="dim", markup=False)


def print_scores(console: Console, scores: Mapping[str, Any], rows: Sequence[Row], *, title: str) -> None:
    """Print what an evaluation found.

    Args:
      console: where to.
      scores: of `evals.score_rows`, with what the probes found.
      rows: one per planned episode.
      title: what was evaluated.
    """
    console.print(title, style="bold", markup=False, soft_wrap=True)
    overall = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    overall.add_column(style="dim", no_wrap=True)
    overall.add_column(overflow="fold")
    for name, value in _overall(scores, rows):
        overall.add_row(name, value)
    console.print(overall)
    for name in ("difficulty", "group"):
        kinds = scores.get(f"by_{name}", {})
        if len(kinds) > 1:
            console.print()
            console.print(_kinds_table(name, kinds))
    failures = [row for row in rows if row["status"] == "error"]
    if failures:
        console.print()
        console.print(_errors_table(failures))


def _overall(scores: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each line; what there is no number for is left out."""
    if "success_rate" in scores:
        yield "success rate", f"{_percent(scores['success_rate'])} ± {_percent(scores['success_rate_se'])} (standard error)"
        if scores["success_rate_strict"] != scores["success_rate"]:
            yield "... of all planned", _percent(scores["success_rate_strict"])
        yield "mean reward", f"{scores['mean_reward']:.3f}"
    for family in ("pass@k", "pass^k"):
        if values := scores.get(family):
            yield family, "  ".join(f"{k}: {_percent(values[k])}" for k in _few(list(values)))
    missing = [f"{scores[key]} {word}" for key, word in (("n_error", "failed"), ("n_unscored", "not scored")) if scores[key]]
    yield "episodes", ", ".join([f"{scores['n_scored']} of {scores['n_planned']} scored", *missing])
    if "truncated_frac" in scores:
        total, mean = sum(row["completion_tokens"] or 0 for row in rows), scores.get("mean_completion_tokens")
        yield "generated tokens", "not told by the server" if mean is None else f"{total:,} ({mean:,.1f} per episode)"
        if scores.get("truncated_frac"):
            yield "cut short", _percent(scores["truncated_frac"])
        if scores.get("mean_num_turns", 1.0) != 1.0:
            yield "turns", f"{scores['mean_num_turns']:.2f} per episode"
    for name, value in scores.get("metrics", {}).items():
        yield name, f"{value:.4g}"
    if "reproducible" in scores:
        yield "reproducible", {True: "yes", False: "no", None: "could not be told"}[scores["reproducible"]]
        for probe in scores.get("probes", ()):
            if probe["passed"] is not True and probe["detail"]:
                yield f"  {probe['kind'].replace('_', ' ')}", probe["detail"]


def _kinds_table(name: str, kinds: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name)
    for column in ("success", "mean reward", "episodes", "scored"):
        table.add_column(column, justify="right")
    for kind, of_kind in list(kinds.items())[:_MAX_KINDS]:
        success = f"{_percent(of_kind['success_rate'])} ± {_percent(of_kind['success_rate_se'])}" if "success_rate" in of_kind else "-"
        reward = f"{of_kind['mean_reward']:.3f}" if "mean_reward" in of_kind else "-"
        table.add_row(kind, success, reward, str(of_kind["n"]), str(of_kind["n_scored"]))
    if len(kinds) > _MAX_KINDS:
        table.add_row(f"... and {len(kinds) - _MAX_KINDS} more", "", "", "", "")
    return table


def _errors_table(failures: Sequence[Row]) -> Table:
    """Return how many episodes failed where, with the words of the first one of each kind."""
    kinds = Counter((row["error"]["stage"], row["error"]["type"]) for row in failures)
    first = {(row["error"]["stage"], row["error"]["type"]): row["error"]["message"] for row in reversed(failures)}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("failed at")
    table.add_column("episodes", justify="right")
    table.add_column("the first one", overflow="fold")
    for kind, num in kinds.most_common():
        table.add_row(kind[0], str(num), f"{kind[1]}: {first[kind][:300]}")
    return table


def _few(ks: list[str]) -> list[str]:
    """Return 1, 2, 4, 8 and so on of some k, and the last.

    Example:
      >>> _few([str(k) for k in range(1, 13)])
      ['1', '2', '4', '8', '12']
    """
    return [k for place, k in enumerate(ks, start=1) if int(k).bit_count() == 1 or place == len(ks)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
