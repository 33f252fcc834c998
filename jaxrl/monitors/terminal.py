"""The run on a terminal: a live view for a person, one plain line per step for a log file or CI.

In: steps, evaluations, phases, single rollouts and words on what is being waited for. Out: text on a console. The live view is redrawn
by a thread of its own from the state kept here; log lines go above it. It reads no files and computes no metric.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.monitors import metrics
from jaxrl.monitors.conversation import conversation
from jaxrl.monitors.curriculum import kinds_in_words
from jaxrl.monitors.learning import Curve, Learning

logger = logging.getLogger(__name__)

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_PADDING = 3
"""Empty places between the columns of figures."""

_FRAME = 4
"""Places that the frame of the live view takes from a line."""

_STATUS_EVERY_S = 30.0
"""A log shows what is waited for this often at most; the live view always does."""

_KINDS_TIMES = 10
"""A log tells of the kinds of tasks so many times in a run, beside the first step, evaluations and the end."""

_NOTICED_S = 1.0
"""A phase that took less gets no line of its own in a log."""

_SPEED_OVER_S = 3.0
"""The engine's speed is that of these last seconds."""

_FIGURES: tuple[tuple[str, str, str], ...] = (
    (metrics.MISMATCH_KL, "mismatch KL", ".1e"),
    (metrics.COMPLETION_TOKENS_MEAN, "tokens/rollout", ".1f"),
    (metrics.GENERATED_TOKENS_PER_S, "generated tok/s", ",.0f"),
    (metrics.TRAIN_TOKENS_PER_S, "trained tok/s", ",.0f"),
    (metrics.ERROR_FRAC, "errors", ".1%"),
    (metrics.STALENESS_MAX, "staleness", ".0f"),
    (metrics.STEP_S, "step s", ".2f"),
    ("memory/host_rss_gib", "host GiB", ".2f"),
    ("memory/device_in_use_gib", "device GiB", ".2f"),
)
"""What a step shows beside what is learned: metric, label, format."""

_EVAL_SCORES = ("success_rate", "mean_reward", "mean_completion_tokens", "truncated_frac")
"""What an evaluation shows, the first one also as a curve; all of its scores are in `metrics.jsonl`."""


class LastingConsole(Console):
    """A console whose reader may go away, as `| head` does; rich's own would end the process, and with it the run."""

    def on_broken_pipe(self) -> None:
        """Be silent from now on."""
        self.quiet = True
        with contextlib.suppress(OSError):
            # What is buffered still goes somewhere when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        logger.warning("nobody reads what the run prints any more; it goes on, and its folder has everything")


@dataclasses.dataclass(slots=True)
class _Phase:
    """A phase that is going on."""

    started_s: float
    shown_s: float
    """When a log last had a line about it."""
    is_first: bool
    """Whether it is the first of its name in this process."""
    done: float = 0.0
    total: float = 1.0
    detail: str = ""


class Terminal:
    """Shows a run as it goes. Thread-safe."""

    def __init__(
        self,
        name: str,
        max_steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start showing.

        Args:
          name: name of the run.
          max_steps: its length in steps.
          first_step: steps that were done before this process began.
          console: where to; None is standard output.
          clock: seconds, for elapsed times.
        """
        self._name = name
        self._max_steps = max_steps
        self._console = console or LastingConsole()
        self._clock = clock
        self._started = clock()
        self._first_step = self._step = first_step
        self._first_done = (first_step, self._started)
        self._values: Mapping[str, float] = {}
        self._learning = Learning()
        self._evals: dict[str, list[tuple[int, float]]] = {}
        self._phases: dict[str, _Phase] = {}
        self._seen_phases: set[str] = set()
        self._meters: dict[str, Callable[[], str]] = {}
        self._status = ""
        self._status_shown = -_STATUS_EVERY_S
        self._kinds_step: int | None = None
        self._lock = threading.RLock()
        self._printed_s = self._started
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()
        self._live: Live | None = None
        self._moved_handlers: list[tuple[logging.StreamHandler, TextIO]] = []
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=5)
            self._moved_handlers = [(handler, handler.stream) for handler in _console_handlers()]
            self._live.start()
            # A handler made earlier holds the real stream and would write across the view; the view's own stream prints
            # above it.
            for handler, _ in self._moved_handlers:
                handler.setStream(sys.stderr)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step.

        What its task samplers make of kinds of tasks is in a log after the first step and each tenth of the run; so it is after an
        evaluation and at the end.
        """
        with self._lock:
            if self._step == self._first_step:
                self._first_done = (step, self._clock())
            self._step, self._values = step, values
            self._learning.add(values)
            figures = self._learning.figures(values, is_per_env=True) + _figures(values)
        if self._live is None:
            width = len(str(self._max_steps))
            self._print(f"step {step:>{width}}/{self._max_steps}  " + "  ".join(f"{k} {v}" for k, v in figures))
        shown, total = self._kinds_step, max(self._max_steps, 1)
        if shown is None or step * _KINDS_TIMES // total > shown * _KINDS_TIMES // total:
            self._tell_kinds()

    def evaluation(self, step: int, env_name: str, scores: Mapping[str, float]) -> None:
        """Show the scores of an evaluation."""
        shown = {score: scores[score] for score in _EVAL_SCORES if score in scores} or dict(scores)
        with self._lock:
            for score, value in list(shown.items())[:1]:
                self._evals.setdefault(f"{env_name} {score}", []).append((step, value))
        if self._live is None:
            self._print(f"eval v{step} {env_name}  " + "  ".join(f"{score} {value:.4g}" for score, value in shown.items()))
        self._tell_kinds()

    def _tell_kinds(self) -> None:
        """Write what is known of kinds of tasks into the log of the run, and onto a terminal without a live view, once per step."""
        with self._lock:
            step, lines = self._step, [] if self._kinds_step == self._step else kinds_in_words(self._values)
            self._kinds_step = step if lines else self._kinds_step
        for line in lines:  # outside the lock: the drawing thread takes it while it holds the console
            logger.info("step %d: %s", step, line)
            if self._live is None:
                self._print(line)

    def progress(self, phase: str, done: float, total: float, detail: str = "") -> None:
        """Show how far a phase is; it goes away once `done >= total`.

        A log has a line when a phase first begins, one about every half a minute while it goes on, and one with its seconds when it first
        ends, if it took long enough to be noticed.
        """
        now, line = self._clock(), ""
        with self._lock:
            is_first = phase not in self._seen_phases
            running = self._phases.get(phase)
            if running is None:
                running = self._phases[phase] = _Phase(now, now, is_first)
                self._seen_phases.add(phase)
                line = f"{phase} ..." if is_first else ""
            running.done, running.total, running.detail = done, total, detail
            if done >= total:
                del self._phases[phase]
                taken_s = now - running.started_s
                line = line or (f"{phase} took {taken_s:.1f} s" if running.is_first and taken_s >= _NOTICED_S else "")
            elif now - running.shown_s >= _STATUS_EVERY_S:
                line = line or f"{phase} {_amount(done, total)} {detail}".rstrip() + f", {_duration(now - running.started_s)}"
            if line:
                running.shown_s = now
        if self._live is None and line:
            self._print(line)

    def meter(self, label: str, read: Callable[[], str]) -> None:
        """Show in the live view what `read` returns whenever that is drawn; a log has it when there was no other line for half a minute."""
        with self._lock:
            self._meters[label] = read
            if self._live is None and self._ticker is None:
                self._ticker = threading.Thread(target=self._tick_until_closed, name="terminal", daemon=True)
                self._ticker.start()

    def tick(self) -> None:
        """Write what the meters show into a log that was silent for long."""
        with self._lock:
            if self._live is None and self._clock() - self._printed_s >= _STATUS_EVERY_S:
                self._print("; ".join(f"{label}: {_read(read)}" for label, read in self._meters.items()))

    def status(self, text: str) -> None:
        """Show what the run is waiting for, as it is; the empty string for nothing."""
        with self._lock:
            is_due = bool(text) and text != self._status and self._clock() - self._status_shown >= _STATUS_EVERY_S
            self._status = text
            if self._live is None and is_due:
                self._status_shown = self._clock()
                self._print(text)

    def say(self, text: str) -> None:
        """Print a line that stays; it stands above the live view."""
        self._print(text)

    def conversation(self, record: Mapping[str, Any]) -> None:
        """Print a rollout, as a record of the rollout log; it stands above the live view."""
        width = None if self._live is None else self._console.width
        self._print(Text("\n").join([*conversation(record, width=width), Text()]))

    def close(self) -> None:
        """Stop showing and leave a summary; a second call does nothing."""
        self._closed.set()
        with self._lock:
            live, self._live = self._live, None
            self._phases.clear()
            self._status = ""
        if live is not None:
            # Outside the lock: the drawing thread takes it, and `stop` waits for that thread.
            live.stop()
            for handler, stream in self._moved_handlers:
                handler.setStream(stream)
        if self._step > self._first_step:
            self._tell_kinds()
            self._print(self._summary())
            self._step = self._first_step

    def abandon(self) -> None:
        """Show the cursor again and wait for nobody: the process ends at once."""
        self._console.show_cursor()

    def _summary(self) -> str:
        num, first = self._step - self._first_step, self._first_step + 1
        which = f"{num} steps" + (f" of this start, from step {first}," if self._first_step else "")
        parts = [f"{which} in {_duration(self._clock() - self._started)}"]
        for curve in self._learning.curves():
            first, last, num = curve.ends()
            parts.append(f"{curve.label} {first:.3f} -> {last:.3f} (mean of {num} first and last)")
            if curve.label == "reward":
                parts += _ends_of(self._learning.of_envs())
        for name, points in self._evals.items():
            if len(points) > 1:
                parts.append(f"{name} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
        return "; ".join(parts)

    def _tick_until_closed(self) -> None:
        while not self._closed.wait(1.0):
            self.tick()

    def _print(self, line: str | Text) -> None:
        self._printed_s = self._clock()
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            elapsed = self._clock() - self._started
            left = self._seconds_left()
            head = Table.grid(expand=True, padding=(0, 2))
            head.add_column(min_width=20, overflow="ellipsis", no_wrap=True)
            head.add_column(ratio=1)
            head.add_column(justify="right", no_wrap=True)
            times = f"{_duration(elapsed)}" + (f", {_duration(left)} left" if left is not None else "")
            head.add_row(f"step {self._step}/{self._max_steps}", ProgressBar(self._max_steps, self._step), times)
            now = self._clock()
            for name, phase in self._phases.items():
                bar = ProgressBar(phase.total, phase.done, complete_style="cyan")
                amount = f"{phase.detail}  {_amount(phase.done, phase.total)}, {_duration(now - phase.started_s)}"
                head.add_row(Text(name, style="cyan"), bar, Text(amount.strip()))
            parts: list[RenderableType] = [head]
            parts += [Text(f"{label}  ", style="dim").append(_read(read)) for label, read in self._meters.items()]
            parts += map(self._curve_line, self._learning.curves())
            if singles := _ends_of(self._learning.of_envs()):
                parts.append(Text("; ".join(singles), style="green", overflow="ellipsis", no_wrap=True))
            parts += [self._eval_line(name, points) for name, points in self._evals.items()]
            if self._values:
                figures = self._learning.figures(self._values) + _figures(self._values)
                parts.append(_figure_grid(figures, self._console.width - _FRAME))
                parts += [Text(line, style="cyan", overflow="ellipsis", no_wrap=True) for line in kinds_in_words(self._values)]
            # An empty line when nothing is waited for: a view that changes its height flickers.
            parts.append(Text(self._status, style="yellow"))
        return Panel(Group(*parts), title=Text(f"jaxrl · {self._name}"), title_align="left", border_style="dim")

    def _seconds_left(self) -> float | None:
        """Estimate from the steps after the first, which alone waits for loading and compiling."""
        step, time_s = self._first_done
        if self._step <= step:
            return None
        return (self._clock() - time_s) / (self._step - step) * (self._max_steps - self._step)

    def _curve_line(self, curve: Curve) -> Text:
        label = f"{curve.label} from step {self._first_step + 1}  " if self._first_step else f"{curve.label}  "
        words = f"  {curve.values[0]:.3f} -> {curve.values[-1]:.3f}, {curve.best}"
        width = max(8, min(_SPARK_WIDTH, self._console.width - _FRAME - len(label) - len(words)))
        return Text(label).append(sparkline(curve.values, width), style="green").append(words, style="bold")

    def _eval_line(self, name: str, points: Sequence[tuple[int, float]]) -> Text:
        shown = [f"{value:.3f} (v{step})" for step, value in points]
        if len(shown) > 4:
            shown = [shown[0], "...", *shown[-3:]]
        return Text(f"eval {name}  ", style="magenta").append(" -> ".join(shown))


class EngineMeter:
    """Words for how fast an engine generates right now, from its counters."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare.

        Args:
          stats: gives `running`, `waiting` and `generated_tokens`; quick and thread-safe.
          clock: seconds.
        """
        self._stats = stats
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque([(clock(), stats()["generated_tokens"])])

    def __call__(self) -> str:
        """Return requests and tokens so far, and the speed over the last seconds."""
        stats, now_s = self._stats(), self._clock()
        self._seen.append((now_s, stats["generated_tokens"]))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > _SPEED_OVER_S:
            self._seen.popleft()
        (then_s, before), total = self._seen[0], stats["generated_tokens"]
        speed = (total - before) / (now_s - then_s) if now_s > then_s else 0.0
        return f"{stats['running']:.0f} running, {stats['waiting']:.0f} waiting, {total:,.0f} tokens, {speed:,.0f} tok/s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve in block characters, `width` at most; more values than that are averaged in equal stretches.

    Example:
      >>> sparkline([0.0, 0.5, 1.0], 8)
      '▁▅█'
    """
    num = min(width, len(values))
    bounds = [round(i * len(values) / num) for i in range(num + 1)] if num else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[int((mean - low) * scale + 0.5)] for mean in means)


def _console_handlers() -> list[logging.StreamHandler]:
    """Return the root logger's handlers that write to this process's terminal."""
    handlers = logging.getLogger().handlers
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in (sys.stdout, sys.stderr)]


def _ends_of(rewards: Sequence[Curve]) -> list[str]:
    return ["reward of {} {:.3f} -> {:.3f}".format(curve.label, *curve.ends()[:2]) for curve in rewards]


def _figures(values: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(label, format(values[name], spec)) for name, label, spec in _FIGURES if name in values]


def _figure_grid(figures: Sequence[tuple[str, str]], width: int) -> Table:
    """Lay figures out in five columns, or in as many as `width` places hold, so that none is broken over two lines."""
    num = max(1, min(5, len(figures)))
    while num > 1 and _grid_width(figures, num) > width:
        num -= 1
    grid = Table.grid(padding=(0, _PADDING))
    for start in range(0, len(figures), num):
        grid.add_row(*(Text(f"{label} ", style="dim").append(value, style="bold") for label, value in figures[start : start + num]))
    return grid


def _grid_width(figures: Sequence[tuple[str, str]], num: int) -> int:
    columns = [max(len(label) + 1 + len(value) for label, value in figures[column::num]) for column in range(num)]
    return sum(columns) + _PADDING * (num - 1)


def _amount(part: float, total: float) -> str:
    return f"{part:,.0f}/{total:,.0f}" if part == int(part) and total == int(total) else f"{part / total:.0%}"


def _read(read: Callable[[], str]) -> str:
    """Ask a meter; one that fails shows nothing, since an exception would end the thread that draws."""
    try:
        return read()
    except Exception:
        return ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
