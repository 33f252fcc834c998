"""What a run may waste in a row before it ends: failed rollouts, and batches that gave nothing to train on.

In: one call per event. Out: the first failure of each kind in the log, and in the end the `RunFailedError` that ends the run with the
reason and what to do. Single failures and single empty batches are normal and pass.
"""

from __future__ import annotations

import logging
from collections import Counter

from jaxrl.blame import blame
from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.types import Boundary, Bucket, Failure, Rollout, filtered

logger = logging.getLogger(__name__)


class FailureBudget:
    """Failed rollouts in a row: of one environment, so that a healthy one hides no broken one, and of all together.

    The first failure of each kind in an environment is logged, so that a run whose budget is never spent says it too.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0
        self._num_in_a_row_of: Counter[str] = Counter()
        self._logged: set[tuple[str, Boundary, str]] = set()

    def add(self, rollout: Rollout, *, is_live: bool = True) -> None:
        """Count a rollout.

        Args:
          rollout: one that arrived or was credited, in this order.
          is_live: the policy played it; False for a frozen source or demonstrations.

        Raises:
          RunFailedError: a budget is spent; shows the last failure and names the part that it comes from.
        """
        if rollout.failure is None:
            self._num_in_a_row = self._num_in_a_row_of[rollout.env_name] = 0
            return
        self._log(rollout, rollout.failure)
        self._num_in_a_row += 1
        self._num_in_a_row_of[rollout.env_name] += 1
        if self._num_in_a_row >= self._max_in_a_row:
            raise _spent(f"{self._num_in_a_row} rollouts in a row failed", rollout, is_live)
        if self._num_in_a_row_of[rollout.env_name] >= self._max_in_a_row:
            row = f"{self._num_in_a_row_of[rollout.env_name]} rollouts in a row failed in environment {rollout.env_name!r}"
            raise _spent(row, rollout, is_live)

    def _log(self, rollout: Rollout, failure: Failure) -> None:
        kind = (rollout.env_name, failure.boundary, failure.type)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "env %r, task %r: a rollout failed at boundary %r, the first of its kind: %s: %.500s; others are in the rollout log only",
                rollout.env_name, rollout.task.id, str(failure.boundary), failure.type, failure.message,
            )  # fmt: skip
            if rollout.traceback:
                logger.info("the traceback of that failure:\n%s", rollout.traceback.rstrip())


def _spent(row: str, rollout: Rollout, is_live: bool) -> RunFailedError:
    failure = rollout.failure
    assert failure is not None
    component = _component_of(failure.boundary, rollout.env_name, is_live)
    error = RunFailedError(
        f"{row}; the last one, member {rollout.member} of group {rollout.group_id!r} (task {rollout.task.id!r}), in the "
        f"{component}, at boundary {str(failure.boundary)!r}: {failure.type}: {failure.message}. Mend the cause, or raise "
        "`orchestrator.max_consecutive_failures`"
    )
    return blame(error, component)


def _component_of(boundary: Boundary, env_name: str, is_live: bool) -> str:
    """Return the part of the run on whose side of the boundary a rollout failed."""
    environment = f"environment {env_name!r}"
    if boundary == Boundary.POLICY:
        return "engine" if is_live else f"source of {environment}"
    part = {Boundary.ALGORITHM: "algorithm", Boundary.GRADER: "reward"}.get(boundary)
    return f"{part} of {environment}" if part else environment


class EmptyBatchBudget:
    """Batches, or as many groups as make a batch, that gave nothing to train on, in a row."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._num_batches = 0
        self._num_groups = 0

    def add_group(self, *, is_kept: bool) -> None:
        """Count a committed group; one of which a rollout was kept ends the row of groups."""
        self._num_groups = 0 if is_kept else self._num_groups + 1

    def add_batch(self, *, is_shipped: bool) -> None:
        """Count a batch; one that was shipped ends the row of batches."""
        self._num_batches = 0 if is_shipped else self._num_batches + 1

    def check(self, step: int, groups_per_step: int, tally: StepTally) -> None:
        """End the run when the budget is spent.

        Args:
          step: the step being collected.
          groups_per_step: groups that make a batch.
          tally: what became of the rollouts since the last step.

        Raises:
          RunFailedError: says what became of them, and what to do.
        """
        num_batches = self._num_batches + self._num_groups // groups_per_step
        if num_batches < self._max_in_a_row:
            return
        buckets = ", ".join(f"{bucket} {count}" for bucket, count in sorted(tally.count_buckets().items()))
        reward = tally.metrics().get(names.REWARD_MEAN)
        raise RunFailedError(
            f"step {step}: {num_batches} batches in a row gave nothing to train on; rollouts since the last step: "
            f"{buckets}; mean reward {'undefined' if reward is None else f'{reward:.4g}'}. {_advice(tally)}"
        )


def _advice(tally: StepTally) -> str:
    """Say what to do about the buckets that took the rollouts, and about no other."""
    buckets = tally.count_buckets()
    sentences = []
    if buckets[Bucket.GATED]:
        words = tally.gates_in_words()
        sentences.append(f"{words[:1].upper()}{words[1:]}: widen them, or leave them out of the environment's `tasks.gates`")
    if tally.metrics().get(names.ZERO_SIGNAL_FRAC):
        sentences.append(
            "Equal rewards in every group carry no signal, and the one reward of a group of one always is equal: use tasks that the policy "
            "solves sometimes, or a larger `orchestrator.group_size`"
        )
    # What carries no signal would train nothing, dropped or not.
    if any(bucket.startswith(filtered("")) and bucket not in (filtered("zero_advantage"), filtered("truncated")) for bucket in buckets):
        sentences.append("What a filter drops too often, it may count only: set its `enforce` = false")
    if buckets[filtered("truncated")]:
        sentences.append(
            "A limit cut rollouts of an environment that does not train on those: raise the limit (`sampling.max_tokens`, "
            "`budget.max_turns`, ...), or set its `truncated` = 'train'"
        )
    if buckets[Bucket.UNSCORED]:
        sentences.append(
            "A rollout without a reward is not trained on, whatever its loss: let the environment give a number, 0 if it has "
            "nothing to measure"
        )
    if buckets[Bucket.OVERLONG_DROPPED]:
        sentences.append(
            "The packer had no use for the overlong: a longer `trainer.row_length` takes them, but where every `coefficients` of "
            "an environment that counts is 0, no token trains"
        )
    failure = tally.last_failure()
    if failure is not None:
        sentences.append(f"Mend what failed, at last at boundary {str(failure.boundary)!r}: {failure.type}: {failure.message}")
    return ". ".join([*sentences, "Or raise `orchestrator.max_empty_batches`"])
