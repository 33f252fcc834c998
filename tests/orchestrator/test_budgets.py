import pytest

from jaxrl.blame import component_of_error
from jaxrl.errors import RunFailedError
from jaxrl.orchestrator.budgets import EmptyBatchBudget, FailureBudget
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.types import Boundary, Failure
from tests.builders import make_rollout


def _failed():
    return make_rollout(None, failure=Failure(Boundary.GRADER, "ZeroDivisionError", "by zero"), with_samples=False)


def test_one_good_rollout_ends_a_row_of_failures():
    budget = FailureBudget(3)
    for rollout in (_failed(), _failed(), make_rollout(), _failed(), _failed()):
        budget.add(rollout)
    with pytest.raises(RunFailedError, match=r"3 rollouts in a row failed.*'grader': ZeroDivisionError: by zero"):
        budget.add(_failed())


@pytest.mark.parametrize(("boundary", "component"), [(Boundary.GRADER, "environment 'env'"), (Boundary.POLICY, "engine")])
def test_the_component_to_blame_is_the_side_of_the_boundary_that_failed(boundary, component):
    rollout = make_rollout(None, failure=Failure(boundary, "X", "x"), with_samples=False, env_name="env")
    with pytest.raises(RunFailedError) as caught:
        FailureBudget(1).add(rollout)
    assert component_of_error(caught.value) == component


def test_an_unscored_rollout_is_no_failure():
    budget = FailureBudget(1)
    budget.add(make_rollout(None))


def test_empty_batches_and_the_groups_that_make_one_are_counted_together():
    budget, tally = EmptyBatchBudget(3), StepTally()
    for _ in range(2):
        budget.add_batch(is_shipped=False)
    for _ in range(3):
        budget.add_group(is_kept=False)
        budget.check(1, 4, tally)
    budget.add_group(is_kept=False)
    with pytest.raises(RunFailedError, match="3 batches in a row gave nothing to train on"):
        budget.check(1, 4, tally)


def test_a_kept_group_and_a_shipped_batch_end_their_rows():
    budget, tally = EmptyBatchBudget(1), StepTally()
    budget.add_group(is_kept=False)
    budget.add_group(is_kept=True)
    budget.add_group(is_kept=False)
    budget.check(1, 2, tally)
    budget.add_batch(is_shipped=False)
    budget.add_batch(is_shipped=True)
    budget.check(1, 2, tally)
