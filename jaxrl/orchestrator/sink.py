"""Takes rollouts as they arrive, credits complete groups, and commits them one by one.

In: each played rollout once. Out: finished groups in the order in which they may be committed, then the rollouts of
each that are fit for a batch: the task sampler has learnt from the group, the failed are filed, the gates have let the group in, the
filters are applied. A failing hook fails rollouts, not the run; too many failures in a row end it.

    who waits             for what                                  unblocked by
    an arriving rollout   a place among its environment's hooks     a hook that ends (each has a deadline)
    a complete group      (synchronous runs) its turn: every group  the group before it, finished or dropped
                          drawn before it is credited

Crediting runs in the task of the rollout that completes the group, beside the main loop; committing is synchronous.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import numpy as np

from jaxrl.batching import rollout_to_samples
from jaxrl.envs.play import is_cancelled_by_owner
from jaxrl.errors import DeadlineError, SampleError
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.budgets import FailureBudget
from jaxrl.orchestrator.filters import Filter, apply_filters
from jaxrl.orchestrator.groups import KeptGroup, OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.tasking import CostReader, ask, learn
from jaxrl.types import Boundary, Bucket, Rollout, filtered

MAX_SCORING_HOOKS = 64
"""Scoring hooks of one environment that run at the same time, or as many as the models that they ask can take, if those are fewer:
a hook's deadline runs, so it must not wait for other hooks. A slow teacher holds up no other environment."""
TRUNCATED = "truncated"
"""Name, as that of a filter, of the rule on rollouts that a limit cut short."""


class Sink:
    """Where rollouts arrive and groups are credited."""

    def __init__(
        self,
        ledger: Ledger,
        tally: StepTally,
        *,
        is_ordered: bool,
        pre_batch_filters: Sequence[Filter],
        max_consecutive_failures: int,
        on_change: Callable[[], None],
    ) -> None:
        """Make an empty sink.

        Args:
          ledger: gets every decision.
          tally: gets every decided rollout of the step being collected.
          is_ordered: groups are credited and finished in draw order, whatever order they complete in.
          pre_batch_filters: applied on commit.
          max_consecutive_failures: failed rollouts in a row, of the whole run or of one environment, that end the run.
          on_change: called after every arrival and every finished group.
        """
        self._ledger = ledger
        self._tally = tally
        self._is_ordered = is_ordered
        self._filters = pre_batch_filters
        # Two rows, because a rollout that arrived whole may still fail when its group is credited, much later.
        self._arrival_failures = FailureBudget(max_consecutive_failures)
        self._credit_failures = FailureBudget(max_consecutive_failures)
        self._costs = CostReader()
        self._on_change = on_change
        self._hooks: dict[str, asyncio.Semaphore] = {}
        self._newest: OpenGroup | None = None
        self.finished: deque[OpenGroup] = deque()
        """Credited groups that wait to be committed; some may have been dropped since."""

    def expect(self, opened: OpenGroup) -> None:
        """Say that the rollouts of a group will come."""
        if self._is_ordered:
            opened.before, self._newest = self._newest, opened

    async def add(self, opened: OpenGroup, rollout: Rollout) -> None:
        """Take a played rollout; the one that completes its group credits the group.

        Raises:
          RunFailedError: too many rollouts in a row failed.
        """
        await self._score_arrival(opened, rollout)
        if opened.is_dropped:
            return
        opened.group.rollouts.append(rollout)
        self._arrival_failures.add(rollout, is_live=opened.env.sampler.samples_from_live_policy)
        self._on_change()
        if opened.group.is_complete:
            await self._credit(opened)

    def commit(self, opened: OpenGroup) -> KeptGroup | None:
        """Let the task sampler learn from a finished group, file what cannot be trained on, ask the gates, and filter the rest.

        The sampler learns from every group that comes here, whatever gates and filters make of it later, and once from each draw. The gates
        see all survivors, also those that are truncated and not trained on: they are in the baseline.

        A rollout without a reward is not trained on, whichever loss its tokens would feed: that an environment could not
        score it says that something about it is amiss. An environment that has nothing to measure gives 0.

        Args:
          opened: finished and not dropped.

        Returns:
          The rollouts that are fit for a batch, still pending; None if there is none.

        Raises:
          RunFailedError: the task sampler or a gate failed.
        """
        env, rollouts = opened.env, opened.group.rollouts
        if not opened.draw.is_counted:
            costs, num_missing = self._costs.read(env, rollouts)
            learn(env, opened.draw.spec, rollouts, costs)
            if num_missing is not None:
                self._tally.add_missing_costs(env.name, num_missing)
        self._tally.add_group(rollouts)
        self.decide(opened, [r for r in rollouts if r.failure is not None], Bucket.ERRORED)
        self.decide(opened, [r for r in rollouts if r.failure is None and r.reward is None], Bucket.UNSCORED)
        survivors = opened.group.survivors
        trainable = self._without_truncated(opened)
        if survivors and env.gates:
            answers = ask(env, survivors)
            self._tally.add_answers(env.name, answers)
            if not all(answers.values()):
                self.decide(opened, trainable, Bucket.GATED)
                return None
        kept = self.filter([KeptGroup(opened, trainable)], self._filters)
        return kept[0] if kept else None

    def filter(self, groups: Iterable[KeptGroup], filters: Sequence[Filter]) -> list[KeptGroup]:
        """File what the filters drop and return the groups that have a rollout left, with those."""
        kept: list[KeptGroup] = []
        for group in groups:
            result = apply_filters(group.rollouts, filters)
            for rollout, name in result.dropped:
                self.decide(group.source, [rollout], filtered(name))
            self._tally.add_matches(result.matched, len(group.rollouts))
            if result.kept:
                kept.append(KeptGroup(group.source, result.kept))
        return kept

    def decide(self, opened: OpenGroup, rollouts: Iterable[Rollout], bucket: str) -> None:
        """File pending rollouts of one group in a ledger bucket."""
        for rollout in rollouts:
            self._ledger.decide(rollout, bucket)
            self._tally.add_rollout(opened.order, rollout)

    def _without_truncated(self, opened: OpenGroup) -> list[Rollout]:
        """File the truncated rollouts that nothing is trained of, as their environment wants it; return the survivors without them."""
        if opened.env.truncated == "train":
            return opened.group.survivors
        scored = [r for r in opened.group.rollouts if r.is_scored]
        self._tally.add_matches({TRUNCATED: sum(r.is_truncated for r in scored)}, len(scored))
        idle = [r for r in scored if r.is_truncated and not _has_member(r)]
        self.decide(opened, idle, filtered(TRUNCATED))
        return [r for r in opened.group.survivors if r.bucket == Bucket.PENDING]

    async def _score_arrival(self, opened: OpenGroup, rollout: Rollout) -> None:
        if rollout.failure is not None:
            return
        truncated = opened.env.truncated if rollout.is_truncated else "train"
        if truncated == "drop":
            return  # without samples it is no survivor: no hook sees it
        try:
            rollout.samples = rollout_to_samples(rollout)
        except SampleError as error:
            rollout.fail(Boundary.POLICY, error)
            return
        if not rollout.samples:
            reason = "the policy sampled no token in it, so there is nothing to train on"
            rollout.fail(Boundary.ENV, reason, kind="EmptyRollout")
            return
        if truncated == "mask":
            for sample in rollout.samples:
                sample.loss_mask = np.zeros(len(sample), bool)
        await self._run_hook(opened, [rollout], partial(opened.env.algorithm.finalize_rollout, rollout))

    async def _credit(self, opened: OpenGroup) -> None:
        opened.group.rollouts.sort(key=lambda rollout: rollout.member)
        if opened.before is not None:
            await opened.before.finished.wait()
            opened.before = None
        survivors = opened.group.survivors
        if survivors:
            await self._run_hook(opened, survivors, partial(opened.env.algorithm.finalize_group, survivors))
        if opened.is_dropped:
            return
        for rollout in survivors:
            self._credit_failures.add(rollout, is_live=opened.env.sampler.samples_from_live_policy)
        self.finished.append(opened)
        opened.finished.set()
        self._on_change()

    def _places(self, env: TrainEnv) -> asyncio.Semaphore:
        """Return the places of an environment's hooks; only once it is set up is known how many there are."""
        if env.name not in self._hooks:
            self._hooks[env.name] = asyncio.Semaphore(min(MAX_SCORING_HOOKS, env.algorithm.max_concurrency or MAX_SCORING_HOOKS))
        return self._hooks[env.name]

    async def _run_hook(
        self, opened: OpenGroup, rollouts: Sequence[Rollout], hook: Callable[[], Awaitable[None]]
    ) -> None:
        """Run a scoring hook under a deadline; what it raises fails the rollouts that it was scoring."""
        deadline_s = opened.env.sampler.rollout_deadline_s
        error: BaseException
        async with self._places(opened.env):
            timer = asyncio.timeout(deadline_s)
            try:
                async with timer:
                    await hook()
                return
            except asyncio.CancelledError as cancelled:
                if is_cancelled_by_owner():
                    raise
                error = cancelled
            except (Exception, SystemExit) as raised:
                late = DeadlineError(f"the algorithm's hook took more than {deadline_s:g} s")
                error = late if timer.expired() else raised
        for rollout in rollouts:
            rollout.fail(Boundary.ALGORITHM, error)


def _has_member(rollout: Rollout) -> bool:
    """Say whether a token of a rollout is in any loss component."""
    return any(member.any() for sample in rollout.samples for member in sample.members())
