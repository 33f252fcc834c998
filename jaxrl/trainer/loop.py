"""The trainer: train batches in, step reports and policy versions out, until the run has its steps.

    waits for                 unblocked by                     bounded by
    a train batch             the channel                      `batch_deadline_s`
    each job on the device    the device thread                the device thread's own deadline
    (`checkpoint_now`)        the end of the current update    `batch_deadline_s`

One job per micro-batch, so that engine ticks interleave with a long step. After step k, skipped or not, version k is
published, then announced, then checkpointed if due, and only then reported. It reads per-token streams and knows no
algorithm, environment or engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from jaxrl.blame import blame, failing_in
from jaxrl.config.trainer import TrainerConfig
from jaxrl.devices import DeviceThread
from jaxrl.errors import CheckpointError, DeadlineError, RunFailedError
from jaxrl.losses import measured
from jaxrl.models.transformer import Params
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.compiles import num_cache_hits, num_compiles
from jaxrl.trainer.memory import memory_metrics
from jaxrl.trainer.state import Accumulator, TrainState
from jaxrl.trainer.step import Arrays, StepPrograms, densify
from jaxrl.trainer.throughput import peak_flops_per_s, throughput_metrics
from jaxrl.types import COMPONENTS, StepReport, TrainBatch

logger = logging.getLogger(__name__)

ORCHESTRATOR_PART = "orchestrator"
"""Name of the orchestrator's bytes in a checkpoint."""


class BatchChannel(Protocol):
    """The trainer's side of the channel between the two arms; blocking and thread-safe."""

    def receive(self, timeout_s: float) -> TrainBatch | None:
        """Return the next batch, or None once the other side has closed; raises DeadlineError."""

    def report(self, report: StepReport) -> None:
        """Hand over the report of a step."""

    def announce(self, version: int) -> None:
        """Say that a policy version has been published."""

    def fail(self, exception: BaseException) -> None:
        """Wake every waiter of the other side with an exception."""


class Trainer:
    """Turns train batches into policy versions; `run` blocks and belongs in a thread of its own."""

    def __init__(
        self,
        programs: StepPrograms,
        state: TrainState,
        config: TrainerConfig,
        *,
        device: DeviceThread,
        channel: BatchChannel,
        publish: Callable[[int, Params], None],
        checkpointer: Checkpointer | None,
        snapshot: Callable[[], bytes],
        max_steps: int,
        start_step: int = 0,
        should_report_logprobs: bool = False,
        peak: float | None = None,
        batch_deadline_s: float = 3600.0,
        progress: Callable[[str, float, float, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire a trainer; nothing runs yet.

        Args:
          programs: from `build_programs`.
          state: at step `start_step`; the trainer takes ownership.
          config: when to checkpoint, and when too many skipped steps end the run.
          device: the started device thread; every JAX call of the trainer goes through it.
          channel: where batches come from and reports go.
          publish: called on the device thread with a version and its parameters, which it must copy; returns when they
            can be served.
          checkpointer: None for a run that keeps nothing.
          snapshot: gives the orchestrator's part of a checkpoint; called from the thread that saves.
          max_steps: steps of the whole run.
          start_step: steps done already, when resuming.
          should_report_logprobs: True puts the trainer's logprobs of every sample into the reports.
          peak: FLOP/s of all devices together; None looks the device up, and goes without `throughput/mfu_frac` if it
            is unknown.
          batch_deadline_s: longest wait for a batch.
          progress: called with `training`, the micro-batches done, all of them, and the speed, from the thread of `run`.
          clock: seconds, monotonic.
        """
        self._programs = programs
        self._state = state
        self._config = config
        self._device = device
        self._channel = channel
        self._publish = publish
        self._checkpointer = checkpointer
        self._snapshot = snapshot
        self._max_steps = max_steps
        self._step = start_step
        self._saved_step = start_step
        self._should_report_logprobs = should_report_logprobs
        self._peak = _peak(programs, config) if peak is None else peak
        self._batch_deadline_s = batch_deadline_s
        self._progress = progress
        self._clock = clock
        self._num_consecutive_skips = 0
        self._num_failed_saves = 0
        # Held from an update until its checkpoint, so that `checkpoint_now` never pairs a state with the snapshot of
        # another step.
        self._updating = threading.RLock()
        num_compiles()

    @property
    def step(self) -> int:
        """Steps done; also the newest policy version."""
        return self._step

    @property
    def state(self) -> TrainState:
        """The state after `step` steps; the next step consumes it."""
        return self._state

    def warm_up(self) -> None:
        """Compile every program of a step ahead of the run; publishing the first version compiles publication."""
        self._device.run(self._programs.compile, kind="trainer")

    def run(self) -> None:
        """Train until `max_steps` or until the channel is closed, and leave a checkpoint of the last step.

        Raises:
          RunFailedError: too many consecutive skipped steps, or a batch that does not fit this run.
          CheckpointError: the last checkpoint could not be written.
          DeadlineError: no batch came in time.
          Exception: whatever a job on the device raised. Every failure is also handed to the channel.
        """
        try:
            self._device.run(self._check_start, kind="trainer")
            while self._step < self._max_steps:
                started = self._clock()
                batch = self._channel.receive(self._batch_deadline_s)
                if batch is None:
                    break
                self._channel.report(self._train(batch, wait_s=self._clock() - started))
                self._check_skips()
            if self._saved_step != self._step:
                self.checkpoint_now()
        except BaseException as error:
            # Before the other arm sees it: what crosses the channel is named after the side that it comes from.
            self._channel.fail(blame(error, "trainer"))
            raise

    def checkpoint_now(self) -> Path | None:
        """Commit the state of the last finished step; callable from any thread, also while `run` is at work (Ctrl-C).

        It blocks, so an event loop that `snapshot` needs must not be the caller.

        Returns:
          The checkpoint's directory, or None for a run that keeps nothing.

        Raises:
          CheckpointError: it could not be written; nothing is lost.
          DeadlineError: the running update did not end in time.
        """
        if self._checkpointer is None:
            return None
        if not self._updating.acquire(timeout=self._batch_deadline_s):
            raise DeadlineError(
                f"a checkpoint waited {self._batch_deadline_s:g} s for the running update; {self._device.describe()}"
            )
        try:
            parts = {ORCHESTRATOR_PART: self._snapshot()}
            return self._device.run(self._save, parts, kind="trainer")
        finally:
            self._updating.release()

    def _train(self, batch: TrainBatch, wait_s: float) -> StepReport:
        """One step: count, accumulate, update, publish, announce, checkpoint."""
        if batch.step != self._step + 1:
            raise RunFailedError(
                f"the trainer stands at step {self._step} and expected the batch of step {self._step + 1}, "
                f"got the batch of step {batch.step}"
            )
        started = self._clock()
        denominators, accumulator = self._device.run(self._begin, batch.member_counts, kind="trainer")
        logprobs: list[jax.Array] = []
        previous: jax.Array | None = None
        self._show_progress(batch, 0, started)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            arrays = densify(micro_batch)
            accumulator, previous = self._device.run(
                self._accumulate, accumulator, arrays, denominators, previous, kind="trainer"
            )
            if self._should_report_logprobs:
                logprobs.append(previous)
            if number > 1:  # the one that was just dispatched is in flight still
                self._show_progress(batch, number - 1, started)
        with self._updating:
            metrics = self._device.run(self._apply, batch, accumulator, kind="trainer")
            metrics |= throughput_metrics(batch, self._programs.model.spec, self._clock() - started, self._peak)
            metrics["time/wait_for_batch_s"] = wait_s
            self._show_progress(batch, len(batch.micro_batches), started)
            with self._timed("time/publish_s", metrics), failing_in("weights"):
                self._device.run(self._publish, self._step, self._state.params, kind="publish")
            self._channel.announce(self._step)
            if self._is_checkpoint_due():
                with self._timed("time/checkpoint_s", metrics):
                    self._checkpoint_or_log()
        metrics["checkpoint/failed"] = float(self._num_failed_saves)
        metrics["compile/count"] = float(num_compiles())
        metrics["compile/cache_hits"] = float(num_cache_hits())
        skipped = not math.isfinite(metrics["optim/grad_norm"])
        self._num_consecutive_skips = self._num_consecutive_skips + 1 if skipped else 0
        token_logprobs = None
        if self._should_report_logprobs:
            token_logprobs = split_by_sample(batch, self._device.run(jax.device_get, logprobs, kind="trainer"))
        return StepReport(
            step=self._step, version=self._step, skipped=skipped, metrics=metrics, token_logprobs=token_logprobs
        )

    def _show_progress(self, batch: TrainBatch, num_done: int, started_s: float) -> None:
        """Say how many micro-batches are done, and how fast; the update counts as part of the last one."""
        if self._progress is None:
            return
        num = len(batch.micro_batches)
        tokens_per_s = batch.num_tokens * num_done / num / max(self._clock() - started_s, 1e-9)
        self._progress("training", num_done, num, f"{tokens_per_s:,.0f} tok/s" if num_done else "")

    @contextlib.contextmanager
    def _timed(self, name: str, metrics: dict[str, float]) -> Iterator[None]:
        started = self._clock()
        yield
        metrics[name] = self._clock() - started

    def _is_checkpoint_due(self) -> bool:
        every = self._config.checkpoint.every_n_steps
        is_last = self._step >= self._max_steps
        return self._checkpointer is not None and (is_last or (every is not None and self._step % every == 0))

    def _checkpoint_or_log(self) -> None:
        """Log and count a failure on the way; the checkpoint at the end of `run` is tried again, and raises."""
        try:
            self.checkpoint_now()
        except CheckpointError as error:
            self._num_failed_saves += 1
            logger.error("the run goes on without this checkpoint: %s", error)

    def _check_skips(self) -> None:
        if self._num_consecutive_skips < self._config.max_skipped_steps:
            return
        try:
            saved = self.checkpoint_now()
        except CheckpointError as error:
            saved = f"nothing ({error})"
        raise RunFailedError(
            f"the gradient was not finite in {self._num_consecutive_skips} consecutive steps, up to step {self._step} "
            f"(`trainer.max_skipped_steps`); the parameters are those of the last good step. Saved: {saved}. Look at "
            "the rollouts of these steps for extreme logprobs or weights, then resume, perhaps with a lower "
            "`trainer.optimizer.lr`"
        )

    # What follows runs on the device thread.

    def _check_start(self) -> None:
        step = int(self._state.step)
        if step != self._step:
            raise RunFailedError(f"the trainer was started at step {self._step} with a state of step {step}")

    def _begin(self, member_counts: np.ndarray) -> tuple[jax.Array, Accumulator]:
        return self._programs.psum_denominators(member_counts), self._programs.zero_accumulator()

    def _accumulate(
        self, accumulator: Accumulator, arrays: Arrays, denominators: jax.Array, previous: jax.Array | None
    ) -> tuple[Accumulator, jax.Array]:
        accumulator, logprobs_BT = self._programs.grad_step(self._state, accumulator, arrays, denominators)
        # One micro-batch stays in flight: its transfer overlaps the last one's work, and the device thread's clock
        # stays honest.
        jax.block_until_ready(previous)
        return accumulator, logprobs_BT

    def _apply(self, batch: TrainBatch, accumulator: Accumulator) -> dict[str, float]:
        _check_counts(batch, jax.device_get(accumulator.metrics.totals))
        self._state, metrics = self._programs.apply(self._state, accumulator)
        self._step += 1
        memory = memory_metrics(self._programs.mesh.local_devices)
        return memory | measured({name: float(value) for name, value in jax.device_get(metrics).items()})

    def _save(self, parts: dict[str, bytes]) -> Path:
        assert self._checkpointer is not None
        with failing_in("checkpoint"):
            path = self._checkpointer.save(self._step, self._state, parts)
        self._saved_step = self._step
        return path


def split_by_sample(batch: TrainBatch, logprobs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Undo the packing of per-token values.

    Args:
      batch: the batch that they were computed from.
      logprobs: [B, T] float32 per micro-batch.

    Returns:
      [L] float32 per packed sample, in the order of the packed samples.
    """
    by_sample: dict[int, np.ndarray] = {}
    for micro_batch, logprobs_BT in zip(batch.micro_batches, logprobs, strict=True):
        for row, segment in np.argwhere(micro_batch.sample_index >= 0):
            is_own = micro_batch.segment_ids[row] == segment + 1
            by_sample[int(micro_batch.sample_index[row, segment])] = logprobs_BT[row, is_own]
    return [by_sample[index] for index in range(batch.num_samples)]


def _check_counts(batch: TrainBatch, totals: Mapping[str, np.ndarray]) -> None:
    """Raise, before any update, if the members that the loss saw are not those that the packer counted."""
    packed = batch.member_counts.sum(axis=0).tolist()
    seen = [round(float(totals[f"tokens/{component}"])) for component in COMPONENTS]
    if seen != packed:
        raise RunFailedError(
            f"step {batch.step}: the packer counted {packed} member tokens of {COMPONENTS}, the loss saw {seen}; "
            "a weight or mask was changed after packing, so the loss would have a wrong scale"
        )


def _peak(programs: StepPrograms, config: TrainerConfig) -> float | None:
    devices = programs.mesh.devices.flatten()
    peak = peak_flops_per_s(devices[0].device_kind, config.compute_dtype)
    return None if peak is None else peak * len(devices)
