"""The asyncio arm of a run: collects a batch per step, ships it, takes the next policy version, and so on.

In: environments to play, a policy, a channel to the trainer. Out: one `TrainBatch` per step, in order. There is one
code path, and `async_level` says how far it may run ahead: at level 0 groups are drawn when the step needs them and
committed in draw order, so that a run can be resumed exactly. Nothing here looks at the type of an environment or of an
algorithm.

    who waits    for what                                   unblocked by                     bounded by
    the run      environments that are set up               see `connections.py`             `wait_deadline_s`
    main loop    an arrival, a finished group, a version    sink, watcher, `request_stop`    `wait_deadline_s`
    main loop    room for the batch                         the trainer                      `wait_deadline_s`
    reporter     a shipped step; that step's report         main loop; the trainer           `wait_deadline_s`
    watcher      a shipped step; a newer version            main loop; the trainer           `wait_deadline_s`
    a rollout    its environment, then its scoring          see `sink.py`                    its own deadline

Shutdown flows with the data: the main loop drops what is in flight, closes the channel and sends None down both queues;
reporter and watcher end when the steps before it are through. The first failure of any part cancels the others and is
raised as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jaxrl.config.orchestrator import OrchestratorConfig
from jaxrl.errors import CheckpointError, DeadlineError, RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.batcher import build_batcher
from jaxrl.orchestrator.budgets import EmptyBatchBudget
from jaxrl.orchestrator.checkpoint import RunState, Stateful, encoded
from jaxrl.orchestrator.connections import close_all, set_up
from jaxrl.orchestrator.dispatcher import Dispatcher
from jaxrl.orchestrator.draws import DrawSource
from jaxrl.orchestrator.filters import build_filters
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.metrics import StepTally, StepTimer, member_metrics, staleness_metrics, time_metrics
from jaxrl.orchestrator.ports import Evaluate, Pack, Policy, StepMonitors, TrainerChannel
from jaxrl.orchestrator.reporter import Reporter
from jaxrl.orchestrator.rules import expected_step, is_stale, lead_steps, may_dispatch, may_draw, should_ship
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.shipping import BatchMaker, ShippedStep
from jaxrl.orchestrator.sink import TRUNCATED, Sink
from jaxrl.orchestrator.spending import Spending
from jaxrl.orchestrator.tasking import sampler_metrics
from jaxrl.orchestrator.watcher import Evaluations, watch_versions
from jaxrl.types import Bucket, Rollout, TrainBatch


class Orchestrator:
    """One run's asyncio arm. Everything but `snapshot` belongs to the event loop's thread."""

    def __init__(
        self,
        config: OrchestratorConfig,
        envs: Sequence[TrainEnv],
        *,
        pool: Policy,
        channel: TrainerChannel,
        pack: Pack,
        monitors: StepMonitors,
        max_steps: int,
        seed: int,
        async_level: int,
        row_length: int,
        overlong: Literal["drop", "truncate"] = "drop",
        evaluate: Evaluate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire the parts; nothing starts before `run`.

        Args:
          config: group and batch sizes, filters, budgets, deadlines.
          envs: the training environments, in a fixed order.
          pool: the live policy, at the version that the first step starts from.
          channel: the way to the trainer.
          pack: the packer with its shapes bound.
          monitors: where each step is written down.
          max_steps: steps of the whole run, resumed parts included.
          seed: `run.seed`.
          async_level: steps that generation may run ahead of training; lowered to `config.max_staleness_steps`, because
            what is played further ahead would be too old for its step.
          row_length: the packer's; a longer sample is overlong.
          overlong: the packer's policy for overlong samples.
          evaluate: measures the served policy; None measures nothing.
          clock: seconds, for durations.
        """
        self._config = config
        self._envs = list(envs)
        self._pool = pool
        self._channel = channel
        self._monitors = monitors
        self._max_steps = max_steps
        self._async_level = min(async_level, config.max_staleness_steps)
        self._clock = clock
        self._step = 1
        self._is_stopping = False
        self._status = ""
        self._changed = asyncio.Event()
        self._versions: asyncio.Queue[int | None] = asyncio.Queue()
        self._snapshots: dict[int, RunState | bytes] = {}
        self._last_reported = 0
        self._tally = StepTally()
        self._timer = StepTimer(clock)
        self._empty_batches = EmptyBatchBudget(config.max_empty_batches)
        vocab_sizes = {env.name: env.sampler.renderer.vocab_size for env in envs}
        before, after = (build_filters(slot, vocab_sizes) for slot in (config.pre_batch_filters, config.post_batch_filters))
        cutting = [TRUNCATED] if any(env.truncated != "train" for env in envs) else []
        self._ledger = Ledger([*(own.name for own in (*before, *after)), *cutting])
        self._source = DrawSource(envs, seed)
        self._sink = Sink(
            self._ledger,
            self._tally,
            is_ordered=self._async_level == 0,
            pre_batch_filters=before,
            max_consecutive_failures=config.max_consecutive_failures,
            on_change=self._changed.set,
        )
        self._dispatcher = Dispatcher(
            envs, self._source, self._sink, self._ledger, group_size=config.group_size, clock=clock
        )
        self._batcher = build_batcher(config, row_length)
        self._maker = BatchMaker(
            self._sink, pack, post_batch_filters=after, row_length=row_length, overlong=overlong
        )
        self._evaluations = Evaluations(pool, evaluate, every_n_steps=config.eval.every_n_steps, last_version=max_steps)
        self._reporter = Reporter(
            channel, monitors, on_report=self._take_report, deadline_s=config.wait_deadline_s, clock=clock
        )
        self._spending = Spending(self._envs)
        self._stateful = Stateful(self._source, self._envs, self._ledger, self._batcher)
        self._snapshots[0] = self._stateful.capture(0, ())  # what no checkpoint could hold is refused before anything is played

    async def run(self) -> None:
        """Collect and ship every step that is left, and return once the trainer has reported the last one.

        Raises:
          RunFailedError: too many failures in a row, nothing to train on, or the parts disagree about steps.
          DeadlineError: a wait ran past its deadline; says who waited for what.
          BaseException: the first failure of any part, as it was raised there.
        """
        failure: BaseException | None = None
        try:
            if self._pool.version != self._step - 1:
                raise RunFailedError(
                    f"step {self._step} starts from version {self._step - 1}, but the policy is at {self._pool.version}"
                )
            await set_up(
                self._envs,
                deadline_s=self._config.wait_deadline_s,
                show=self._show_status,
                is_stopping=lambda: self._is_stopping,
            )
            async with asyncio.TaskGroup() as tasks:
                for loop in (self._collect(tasks), self._watch(), self._report()):
                    tasks.create_task(loop, name=loop.__name__)
        except BaseExceptionGroup as failures:
            failure = _first_of(failures)
        finally:
            await self._close()
        if failure is not None:
            raise failure

    def request_stop(self) -> None:
        """Draw no more, cancel what is played or measured, and let `run` return once the shipped steps are reported."""
        self._is_stopping = True
        self._evaluations.cancel()
        self._changed.set()

    def snapshot(self, step: int | None = None) -> bytes:
        """Return the state as of the batch of `step`; may be called from any thread.

        Args:
          step: the step that the checkpoint is of: its batch and those before it count as trained, everything drawn for
            later ones is played again. None is the newest step known here to be applied; a trainer that has just
            applied one knows better and should say it.

        Returns:
          Bytes for `restore`.

        Raises:
          CheckpointError: no batch of that step was shipped, or it is older than the newest report.
          RunFailedError: the state of a task sampler is no JSON value.
        """
        wanted = max(self._last_reported, self._pool.version) if step is None else step
        kept = self._snapshots.get(wanted)
        if kept is None:
            raise CheckpointError(f"there is no snapshot of step {wanted}, only of {sorted(self._snapshots)}")
        return kept if isinstance(kept, bytes) else encoded(kept)

    def restore(self, data: bytes) -> None:
        """Continue from a snapshot; call it before `run`.

        Raises:
          CheckpointError: the bytes are no snapshot, or one of another run.
        """
        self._last_reported = self._stateful.restore(data)
        self._step = self._last_reported + 1
        self._snapshots = {self._last_reported: data}

    def spent_by(self, version: int) -> dict[str, float]:
        """Return what training had taken by a version that is measured; see `Spending.at`."""
        return self._spending.at(version)

    def describe(self) -> str:
        """Say in one line where the run stands and what it waits for."""
        in_flight = list(self._dispatcher.in_flight.values())
        playing = ", ".join(f"{env.name} {sum(opened.env is env for opened in in_flight)}" for env in self._envs)
        oldest_s = max((self._clock() - opened.opened_at_s for opened in in_flight), default=0.0)
        is_open = may_dispatch(self._step, self._pool.version, self._async_level)
        return (
            f"step {self._step} of {self._max_steps}: {self._batcher.kept} of {self._batcher.needed} collected, groups "
            f"in flight: {playing} (oldest {oldest_s:.0f} s), policy version {self._pool.version}, last report of step "
            f"{self._last_reported}, dispatch {'open' if is_open else 'closed until a newer version comes'}"
            + (", an evaluation is running" if self._evaluations.is_running else "")
        )

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        """Collect and ship one step after the other."""
        try:
            if self._evaluations.is_due_at_start(self._step - 1):
                await self._evaluations.run()
            self._timer.restart()
            self._reporter.start_clock()
            while not self._is_stopping and self._step <= self._max_steps:
                self._changed.clear()
                self._advance(tasks)
                if self._should_ship():
                    await self._ship()
                else:
                    await self._wait()
        finally:
            self._abandon()
            self._channel.close()
        self._ledger.check(self._num_held())
        self._reporter.end()
        self._versions.put_nowait(None)

    async def _watch(self) -> None:
        with self._saying_where():
            await watch_versions(
                self._versions,
                self._channel,
                self._pool,
                self._evaluations,
                on_version=self._take_version,
                deadline_s=self._config.wait_deadline_s,
            )

    async def _report(self) -> None:
        with self._saying_where():
            await self._reporter.run()

    def _advance(self, tasks: asyncio.TaskGroup) -> None:
        """Commit what is finished, and draw what is wanted after each commit, so that draws never depend on timing."""
        for group in self._batcher.pop_stale(self._step, self._config.max_staleness_steps):
            self._sink.decide(group.source, group.rollouts, Bucket.STALE)
        self._draw(tasks)
        while self._sink.finished:
            opened = self._sink.finished.popleft()
            if not opened.is_dropped:
                self._commit(opened)
                self._draw(tasks)

    def _commit(self, opened: OpenGroup) -> None:
        if is_stale(self._step, opened.oldest_version, self._config.max_staleness_steps):
            self._drop(opened, Bucket.STALE)
            return
        self._dispatcher.release(opened)
        kept = self._sink.commit(opened)
        if kept is not None:
            self._batcher.add(kept)
            self._monitors.progress("generating", min(self._batcher.kept, self._batcher.needed), self._batcher.needed)
        self._empty_batches.add_group(is_kept=kept is not None)
        self._empty_batches.check(self._step, self._batcher.groups_per_step, self._tally)

    def _draw(self, tasks: asyncio.TaskGroup) -> None:
        is_open = may_dispatch(self._step, self._pool.version, self._async_level)
        self._timer.set_gate(is_open=is_open)
        self._show_status("" if is_open else f"waiting for policy version {self._step - 1 - self._async_level}")
        num_steps = 1 if self._async_level == 0 else self._max_steps - self._step + 1
        needed = self._batcher.needed
        while is_open:
            num_in_flight = len(self._dispatcher.in_flight)
            kept, in_flight = self._batcher.kept, self._batcher.expected_size(num_in_flight)
            is_wanted = may_draw(
                kept=kept,
                in_flight=in_flight,
                needed=needed * num_steps,
                num_in_flight=num_in_flight,
                max_in_flight=self._config.max_inflight_groups or self._batcher.groups_per_step,
            )
            # Note: a group that would be too old for the step it can reach is not drawn; a newer version is on its way.
            step = expected_step(self._step, kept=kept, in_flight=in_flight, needed=needed)
            if not is_wanted or is_stale(step, self._pool.version, self._config.max_staleness_steps):
                return
            self._dispatcher.open(self._pool.version, tasks)
            if kept < needed:
                self._monitors.progress("generating", kept, needed)

    def _should_ship(self) -> bool:
        return should_ship(
            kept=self._batcher.kept,
            needed=self._batcher.needed,
            num_in_flight=len(self._dispatcher.in_flight),
            lead=lead_steps(self._step, self._pool.version),
            async_level=self._async_level,
        )

    async def _ship(self) -> None:
        """Pack and send the batch of the step; an empty one is counted and collected again."""
        generate_s, wait_s = self._timer.lap()
        packing_s = self._clock()
        made = await self._maker.make(self._step, self._batcher.take(everything=self._async_level == 0))
        pack_s = self._clock() - packing_s
        self._empty_batches.add_batch(is_shipped=made is not None)
        if made is None:
            self._empty_batches.check(self._step, self._batcher.groups_per_step, self._tally)
            return
        batch, trained = made
        if self._step == self._max_steps:
            self._abandon()
        self._ledger.check(self._num_held())
        rollouts = self._tally.rollouts()
        times = time_metrics(rollouts, generate_s=generate_s, wait_s=wait_s, pack_s=pack_s)
        shipped = ShippedStep(self._step, self._step_metrics(batch, trained) | times, rollouts)
        self._spending.note(self._step)
        self._tally.clear()
        self._reporter.add(shipped)
        # Invariant: the snapshot of a step exists before the trainer can ask for it. Its bytes are made when it does: with many kinds of
        # tasks that takes long, and most steps have no checkpoint.
        self._snapshots[self._step] = self._stateful.hold(self._step, self._dispatcher.in_flight.values())
        with self._saying_where():
            await self._channel.send(batch, self._config.wait_deadline_s)
        self._versions.put_nowait(self._step)
        self._step += 1
        self._timer.restart()

    def _step_metrics(self, batch: TrainBatch, trained: list[Rollout]) -> dict[str, float]:
        values = self._tally.metrics() | self._ledger.metrics() | staleness_metrics(batch.step, trained) | member_metrics(trained)
        for env in self._envs:
            values |= {names.task_metric(env.name, counter): value for counter, value in sampler_metrics(env).items()}
        return values | {names.OVERLONG_SAMPLES: float(len(batch.overlong))}

    async def _wait(self) -> None:
        """Wait until something happened."""
        deadline_s = self._config.wait_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._changed.wait()
        except TimeoutError:
            # Note: an evaluation may hold the next version for long; each of its rollouts has a deadline of its own.
            if not self._evaluations.is_running:
                raise DeadlineError(
                    f"nothing happened for {deadline_s:g} s (`orchestrator.wait_deadline_s`); {self.describe()}"
                ) from None

    def _take_version(self, version: int) -> None:
        """Drop the groups in flight that are too old for any step to come, and look at everything again."""
        for opened in list(self._dispatcher.in_flight.values()):
            oldest = opened.group.version if opened.env.sampler.samples_from_live_policy else None
            if is_stale(max(self._step, version + 1), oldest, self._config.max_staleness_steps):
                self._drop(opened, Bucket.STALE)
        self._changed.set()

    def _take_report(self, step: int) -> None:
        self._last_reported = step
        self._snapshots = {kept: data for kept, data in self._snapshots.items() if kept >= step}
        self._changed.set()

    def _drop(self, opened: OpenGroup, bucket: Bucket) -> None:
        self._dispatcher.drop(opened)
        self._sink.decide(opened, opened.members, bucket)

    def _abandon(self) -> None:
        """Give up everything that no step will train on."""
        for opened in list(self._dispatcher.in_flight.values()):
            self._drop(opened, Bucket.CANCELLED)
        for group in self._batcher.take(everything=True):
            self._sink.decide(group.source, group.rollouts, Bucket.CANCELLED)

    def _num_held(self) -> int:
        playing = sum(len(opened.members) for opened in self._dispatcher.in_flight.values())
        return playing + sum(len(group.rollouts) for group in self._batcher.waiting)

    def _show_status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self._monitors.status(text)

    @contextlib.contextmanager
    def _saying_where(self) -> Iterator[None]:
        """Add the state of the run to a deadline that passed."""
        try:
            yield
        except DeadlineError as error:
            raise DeadlineError(f"{error}; {self.describe()}") from error

    async def _close(self) -> None:
        """Tell the trainer, write down rollouts of no shipped step, and give back what the environments connected to."""
        self._channel.close()
        try:
            await self._reporter.close()
            if self._tally.rollouts():
                await asyncio.to_thread(self._monitors.log_rollouts, self._step, self._tally.rollouts())
        finally:
            await close_all(self._envs)


def _first_of(failures: BaseExceptionGroup) -> BaseException:
    """Return the failure that came first, out of groups in groups."""
    first: BaseException = failures.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
