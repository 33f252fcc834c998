"""Every monitor of a run behind one object.

In: numbers, rollouts and words from the pipeline. Out: the files of the run folder and a view on the terminal. A
monitor that fails warns once and never stops the run; only `metrics.jsonl` must be writable at the start. Nothing here
computes a metric.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxrl.config.monitors import MonitorsConfig
from jaxrl.monitors import metrics
from jaxrl.monitors.environment import describe_environment
from jaxrl.monitors.folder import eval_paths
from jaxrl.monitors.jsonl import MetricsFile, append_compact_lines, append_lines, finite_values, replace_compact_lines
from jaxrl.monitors.logs import RunLog
from jaxrl.monitors.rollouts import rollout_record
from jaxrl.monitors.terminal import Terminal
from jaxrl.monitors.tokens import TokenTexts
from jaxrl.monitors.trackers import STEPS, Tracker, open_trackers
from jaxrl.types import Rollout

logger = logging.getLogger(__name__)

_STEP_FILE = re.compile(r"step_(\d{6,})\b")


class MonitorSet:
    """Every monitor of one run. Thread-safe; methods that write files belong in a worker thread."""

    def __init__(
        self,
        run_dir: Path,
        config: MonitorsConfig,
        *,
        name: str,
        max_steps: int,
        resume_step: int | None = None,
        devices: Sequence[str] = (),
        run_config: Mapping[str, Any] | None = None,
        decode_token: Callable[[int], str] | None = None,
        log: RunLog | None = None,
        console: Console | None = None,
    ) -> None:
        """Open the run folder's records.

        Args:
          run_dir: the run folder; made if needed.
          config: which monitors are on.
          name: name of the run, for the terminal and the plot.
          max_steps: length of the whole run, in steps.
          resume_step: None for a new run; else the last step to keep, and what later steps wrote is removed.
          devices: one name per device, for `environment.json`.
          run_config: the whole configuration as JSON values, for trackers, which get it without secrets.
          decode_token: gives the text of a token id, for the rollout log; None leaves the texts out. Called in worker
            threads.
          log: told each step that is recorded.
          console: where the terminal view goes; None is standard output.

        Raises:
          ConfigError: `metrics.jsonl` cannot be written.
        """
        self._run_dir = run_dir
        self._config = config
        self._name = name
        self._texts = None if decode_token is None else TokenTexts(decode_token)
        self._log = log
        self._failed: set[str] = set()
        self._is_closed = False
        self.phase = ""
        """The phase that `progress` was last told of; empty once that is done."""
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", resume_step)
        self._terminal: Terminal | None = None
        self._guard("old step files", lambda: self._remove_steps_after(-1 if resume_step is None else resume_step))
        self._environment: dict[str, Any] = {}
        self._start = self._environment
        if resume_step is not None:
            self._guard("earlier starts", lambda: self._keep_earlier_starts(resume_step))
        self._guard("environment.json", lambda: self.note(**describe_environment(devices)))
        if config.terminal:
            self._guard("terminal", lambda: self._open_terminal(console, max_steps, resume_step or 0))
        self._trackers: list[Tracker] = open_trackers(run_dir, config, name=name, run_config=run_config or {}, resume_step=resume_step)

    def note(self, **facts: Any) -> None:
        """Add facts about this start of the run, as JSON values, to `environment.json`; one that is there already is replaced."""
        self._start |= facts
        text = json.dumps(self._environment, indent=2) + "\n"
        self._guard("environment.json", lambda: (self._run_dir / "environment.json").write_text(text, encoding="utf-8"))

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step.

        Args:
          step: 1-based.
          values: numbers by metric name (see `monitors.metrics`); numbers that are not finite are dropped with a
            warning.
        """
        self._guard("metrics.jsonl", lambda: self._metrics.log(step, values))
        self._track(STEPS, step, values)
        if self._log is not None:
            self._log.step = step
        self._show(lambda terminal: terminal.step(step, values))

    def log_rollouts(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """Append rollouts of a step to `rollouts/step_NNNNNN.jsonl`; slow, so called in a worker thread."""
        if self._config.rollouts:
            self._guard("rollouts", lambda: append_compact_lines(self._rollouts_path(step), self._records(step, rollouts)))

    def update_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Put the rollouts of a step, of which more is known now, in place of its file; as slow as `log_rollouts`.

        Only a token export knows more. One of them is shown on the terminal, if that is asked for.
        """
        if self._config.rollouts and self._config.token_export:
            self._guard("rollouts", lambda: replace_compact_lines(self._rollouts_path(step), self._records(step, rollouts)))
        if self._config.show_rollout_every_n_steps and step % self._config.show_rollout_every_n_steps == 0:
            self._show(lambda terminal: self._show_one(terminal, step, rollouts))

    def _show_one(self, terminal: Terminal, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show one rollout of a step that has begun, of another place in the order each time."""
        if begun := [rollout for rollout in rollouts if rollout.nodes]:
            terminal.conversation(rollout_record(step, begun[step % len(begun)], token_export=False))

    def _rollouts_path(self, step: int) -> Path:
        return self._run_dir / "rollouts" / f"step_{step:06d}.jsonl"

    def _records(self, step: int, rollouts: Iterable[Rollout]) -> Iterator[dict[str, Any]]:
        is_export = self._config.token_export
        return (rollout_record(step, rollout, token_export=is_export, texts=self._texts) for rollout in rollouts)

    def log_eval(
        self,
        step: int,
        env_name: str,
        scores: Mapping[str, float],
        rows: Iterable[Any] = (),
        write_result: Callable[[Path], None] | None = None,
    ) -> None:
        """Record an evaluation.

        Args:
          step: policy version that was measured; 0 is the base policy.
          env_name: the environment.
          scores: become the metrics `eval/<env_name>/<score>` in the step's row.
          rows: one JSON-like value per rollout, for `evals/step_NNNNNN.<env_name>.jsonl`.
          write_result: writes the whole result to a path, `evals/step_NNNNNN.<env_name>.json`, once all else is written.
        """
        values = {metrics.eval_score(env_name, score): value for score, value in scores.items()}
        self._guard("metrics.jsonl", lambda: self._metrics.log(step, values))
        self._track(env_name, step, values)
        self._guard("evals", lambda: self._write_eval(step, env_name, rows, write_result))
        self._show(lambda terminal: terminal.evaluation(step, env_name, scores))

    def _write_eval(self, step: int, env_name: str, rows: Iterable[Any], write_result: Callable[[Path], None] | None) -> None:
        rows_path, result_path = eval_paths(self._run_dir, step, env_name)
        for path in (result_path, rows_path):
            path.unlink(missing_ok=True)
        append_lines(rows_path, rows)
        if write_result is not None:
            write_result(result_path)

    def status(self, text: str) -> None:
        """Show what the run is waiting for, as it is; the empty string for nothing."""
        self._show(lambda terminal: terminal.status(text))

    def progress(self, phase: str, done: float, total: float, detail: str = "") -> None:
        """Show how far a phase is (`loading`, `compiling`, `generating`, `training`, ...); `done >= total` ends it.

        Args:
          phase: its name.
          done: how much is done.
          total: how much there is, in the same unit.
          detail: what of it is being done, or how fast.
        """
        self.phase = phase if done < total else ""
        self._show(lambda terminal: terminal.progress(phase, done, total, detail))

    def say(self, text: str) -> None:
        """Print a line that stays, above a live view."""
        self._show(lambda terminal: terminal.say(text))

    def meter(self, label: str, read: Callable[[], str]) -> None:
        """Show what `read` returns each time that the view is drawn; always one line. It must be quick and thread-safe."""
        self._show(lambda terminal: terminal.meter(label, read))

    def abandon(self) -> None:
        """Leave the terminal usable in a process that ends at once."""
        self._show(lambda terminal: terminal.abandon())

    def close(self) -> None:
        """Draw the reward curve, let the trackers finish and give the terminal back; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._guard("metrics.jsonl", self._metrics.close)
        if self._config.plot:
            self._guard("reward_curve.png", self._plot)
        self._show(lambda terminal: terminal.close())
        for tracker in self._trackers:
            tracker.close()

    def _keep_earlier_starts(self, step: int) -> None:
        """Begin the entry of this start, which goes on from `step`, below what the file says of the earlier ones."""
        environment = json.loads((self._run_dir / "environment.json").read_text(encoding="utf-8"))
        start: dict[str, Any] = {"resumed_step": step}
        environment.setdefault("resumes", []).append(start)
        self._environment, self._start = environment, start

    def _guard(self, sink: str, action: Callable[[], object]) -> None:
        """Do what a sink does; when it fails, warn the first time and go on."""
        try:
            action()
        except Exception as error:
            if sink not in self._failed:
                self._failed.add(sink)
                logger.warning("monitor %r failed, the run goes on without it: %s: %s", sink, type(error).__name__, error)

    def _show(self, action: Callable[[Terminal], None]) -> None:
        terminal = self._terminal
        if terminal is not None:
            self._guard("terminal", lambda: action(terminal))

    def _track(self, family: str, step: int, values: Mapping[str, float]) -> None:
        if self._trackers:
            self._guard("trackers", lambda: [tracker.log(family, step, finite_values(values)) for tracker in self._trackers])

    def _open_terminal(self, console: Console | None, max_steps: int, first_step: int) -> None:
        self._terminal = Terminal(self._name, max_steps, first_step=first_step, console=console)

    def _plot(self) -> None:
        # matplotlib takes half a second to import, which a dry run or a short check should not pay.
        from jaxrl.monitors.plot import draw_reward_curve

        draw_reward_curve(self._run_dir, self._name)

    def _remove_steps_after(self, step: int) -> None:
        for folder in ("rollouts", "evals"):
            for path in (self._run_dir / folder).glob("step_*.json*"):
                match = _STEP_FILE.match(path.name)
                if match and int(match[1]) > step:
                    path.unlink()
