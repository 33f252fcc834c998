"""Copies of the metrics for TensorBoard and Weights & Biases, made beside the run and never in its way.

In: rows as they go into `metrics.jsonl`, which stays the truth. Out: event files, or a run of wandb. Each tracker has a thread of its own
and a bounded queue: one that is slow loses rows, one that fails is dropped, and either is worth one warning. Each family of rows (the
steps, and each environment's evaluations) has its own axis, so an evaluation that comes late goes to the step that it measured.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl.config.dump import redact
from jaxrl.config.monitors import MonitorsConfig, TensorBoardConfig, WandbConfig

logger = logging.getLogger(__name__)

STEPS = "step"
"""The family of the rows of steps; any other is the name of an evaluated environment."""

QUEUE_ROWS = 1000
"""Rows that may wait for a tracker; more are left out."""

CLOSE_DEADLINE_S = 60.0
"""How long the end of a run waits for a tracker to take what is queued."""


class Writer(Protocol):
    """A tracker's own library, used from one thread only."""

    def write(self, family: str, step: int, values: Mapping[str, float]) -> None:
        """Take one row; of a family, rows come with steps that do not fall."""
        ...

    def close(self) -> None:
        """Hand over everything and end."""
        ...


class Tracker:
    """A writer behind a queue. `log` never waits and never raises."""

    def __init__(self, name: str, open_writer: Callable[[], Writer], *, queue_rows: int = QUEUE_ROWS) -> None:
        """Start the thread, which opens the writer.

        Args:
          name: for warnings.
          open_writer: called on the tracker's thread; may take its time, since a server may be far away.
          queue_rows: rows that may wait.
        """
        self._name = name
        self._open_writer = open_writer
        self._rows: queue.Queue[tuple[str, int, dict[str, float]] | None] = queue.Queue(queue_rows)
        self._num_lost = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, family: str, step: int, values: Mapping[str, float]) -> None:
        """Queue a row."""
        if self._is_closed:
            return
        try:
            self._rows.put_nowait((family, step, dict(values)))
        except queue.Full:
            if self._num_lost == 0:
                text = "tracker %r is slower than the run and loses rows, from step %d on; metrics.jsonl has them all"
                logger.warning(text, self._name, step)
            self._num_lost += 1

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Wait until everything is handed over, for `deadline_s` at most; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        until = time.monotonic() + deadline_s
        try:
            self._rows.put(None, timeout=deadline_s)
            self._thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning("tracker %r did not take the last rows within %g s; metrics.jsonl has them all", self._name, deadline_s)

    def _work(self) -> None:
        writer: Writer | None = None
        has_failed = False
        try:
            writer = self._open_writer()
        except Exception as error:
            has_failed = True
            self._warn(error)
        # A tracker that failed goes on emptying its queue, so that nobody waits for it.
        while (row := self._rows.get()) is not None:
            if has_failed or writer is None:
                continue
            try:
                writer.write(*row)
            except Exception as error:
                has_failed = True
                self._warn(error)
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                if not has_failed:
                    self._warn(error)

    def _warn(self, error: Exception) -> None:
        logger.warning("tracker %r failed, the run goes on without it: %s: %s", self._name, type(error).__name__, error)


def open_trackers(
    run_dir: Path, config: MonitorsConfig, *, name: str, run_config: Mapping[str, Any], resume_step: int | None
) -> list[Tracker]:
    """Start the trackers that a run asks for.

    Args:
      run_dir: the run folder, which exists.
      config: which ones.
      name: name of the run.
      run_config: the whole configuration as JSON values, to be shown beside the curves; secrets are cut out here.
      resume_step: the last step that a resumed run keeps; None for a new run.
    """
    shown = redact(dict(run_config))
    trackers: list[Tracker] = []
    board, wandb = config.tensorboard, config.wandb
    if board is not None:
        trackers.append(Tracker("tensorboard", lambda: TensorBoardWriter(run_dir, board, run_config=shown, resume_step=resume_step)))
    if wandb is not None:
        is_resumed = resume_step is not None
        trackers.append(Tracker("wandb", lambda: WandbWriter(run_dir, wandb, name=name, run_config=shown, is_resumed=is_resumed)))
    return trackers


class TensorBoardWriter:
    """Event files that TensorBoard reads."""

    def __init__(self, run_dir: Path, config: TensorBoardConfig, *, run_config: Mapping[str, Any], resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(config.log_dir) if config.log_dir else run_dir / "tensorboard"
        # What earlier files have of the steps that are done again is hidden.
        purge_step = None if resume_step is None else resume_step + 1
        suffix = f".after_step_{resume_step or 0:06d}"  # names are otherwise made of the second, and two would share a file
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, max_queue=1000, flush_secs=30, filename_suffix=suffix)
        if resume_step is None:
            self._writer.add_text("config", f"```json\n{json.dumps(run_config, indent=2)}\n```", 0)

    def write(self, family: str, step: int, values: Mapping[str, float]) -> None:
        """Write one point per metric; the axis of each is its own."""
        del family
        for metric, value in values.items():
            self._writer.add_scalar(metric, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbWriter:
    """One run of Weights & Biases, which a resumed run goes on with.

    `wandb.json` in the run folder holds the run's id and the last step of each family. A step that is done again after a resume is there
    already and is not sent again, so that no axis goes back.
    """

    def __init__(self, run_dir: Path, config: WandbConfig, *, name: str, run_config: Mapping[str, Any], is_resumed: bool) -> None:
        import wandb

        self._state_path = run_dir / "wandb.json"
        state = self._read_state() if is_resumed else {}
        self._id: str = state.get("id") or uuid.uuid4().hex[:12]
        self._last_steps: dict[str, int] = dict(state.get("last_steps") or {})
        self._families: set[str] = set()
        # Older releases of wandb have no such setting; without it the process ends when everything is uploaded, which may be never.
        bounds: dict[str, Any] = {"finish_timeout": CLOSE_DEADLINE_S} if "finish_timeout" in wandb.Settings.model_fields else {}
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=name,
            id=self._id,
            resume="allow" if config.mode == "online" else None,
            dir=str(run_dir),
            config=dict(run_config),
            # The terminal, the code and the machine are nobody's business but the run folder's.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                **bounds,
            ),
        )
        self._run.define_metric(STEPS)
        self._run.define_metric("*", step_metric=STEPS, step_sync=False)
        self._write_state()

    def write(self, family: str, step: int, values: Mapping[str, float]) -> None:
        """Log one row on its family's axis."""
        if step <= self._last_steps.get(family, -1):
            return
        axis = STEPS
        if family != STEPS:
            axis = f"eval/{family}/step"
            if family not in self._families:
                self._families.add(family)
                self._run.define_metric(axis, hidden=True)
                self._run.define_metric(f"eval/{family}/*", step_metric=axis)
        self._run.log({axis: step, **values})
        self._last_steps[family] = step
        self._write_state()

    def close(self) -> None:
        """Upload, or write down, what is left."""
        self._run.finish()

    def _read_state(self) -> dict[str, Any]:
        try:
            return json.loads(self._state_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _write_state(self) -> None:
        new = self._state_path.with_suffix(".json.new")
        new.write_text(json.dumps({"id": self._id, "last_steps": self._last_steps}) + "\n", encoding="utf-8")
        os.replace(new, self._state_path)
