"""What a run may waste in a row before it ends: failed rollouts, and batches that gave nothing to train on.

In: one call per event. Out: nothing, or the `RunFailedError` that ends the run with the reason and what to do. Single
failures and single empty batches are normal and pass.
"""

from __future__ import annotations

from jaxrl.blame import blame
from jaxrl.errors import RunFailedError
from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.types import Boundary, Rollout


class FailureBudget:
    """Failed rollouts in a row."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0

    def add(self, rollout: Rollout) -> None:
        """Count a rollout that arrived.

        Raises:
          RunFailedError: the budget is spent; shows the last failure.
        """
        failure = rollout.failure
        if failure is None:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        if self._num_in_a_row >= self._max_in_a_row:
            component = "engine" if failure.boundary == Boundary.POLICY else f"environment {rollout.env_name!r}"
            spent = RunFailedError(
                f"{self._num_in_a_row} rollouts in a row failed; the last one, member {rollout.member} of group "
                f"{rollout.group_id!r} (task {rollout.task.id!r}), at boundary {str(failure.boundary)!r}: "
                f"{failure.type}: {failure.message}. Mend the cause, or raise `orchestrator.max_consecutive_failures`"
            )
            raise blame(spent, component)


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
            f"{buckets}; mean reward {'undefined' if reward is None else f'{reward:.4g}'}. Equal rewards in every "
            "group carry no signal: use tasks that the policy solves sometimes, or a larger `orchestrator.group_size`; "
            "overlong rollouts need a longer `trainer.row_length`; "
            "otherwise mend what failed, or raise `orchestrator.max_empty_batches`"
        )
