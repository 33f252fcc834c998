import numpy as np
import pytest

from jaxrl.blame import component_of_error
from jaxrl.errors import RunFailedError
from jaxrl.orchestrator.budgets import EmptyBatchBudget, FailureBudget
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.types import Boundary, Bucket, Failure
from tests.builders import make_rollout


def _failed(env_name="toy", boundary=Boundary.GRADER):
    failure = Failure(boundary, "X", "x") if env_name != "toy" else Failure(boundary, "ZeroDivisionError", "by zero")
    return make_rollout(None, failure=failure, with_samples=False, env_name=env_name)


def test_one_good_rollout_ends_a_row_of_failures():
    budget = FailureBudget(3)
    for rollout in (_failed(), _failed(), make_rollout(), _failed(), _failed()):
        budget.add(rollout)
    with pytest.raises(RunFailedError, match=r"3 rollouts in a row failed.*'grader': ZeroDivisionError: by zero"):
        budget.add(_failed())


@pytest.mark.parametrize(
    ("boundary", "is_live", "component"),
    [
        (Boundary.POLICY, True, "engine"),
        (Boundary.POLICY, False, "source of environment 'sums'"),
        (Boundary.ALGORITHM, True, "algorithm of environment 'sums'"),
        (Boundary.GRADER, True, "reward of environment 'sums'"),
        (Boundary.ENV, True, "environment 'sums'"),
        (Boundary.TIMEOUT, False, "environment 'sums'"),
    ],
)
def test_the_component_to_blame_is_the_side_of_the_boundary_that_failed(boundary, is_live, component):
    with pytest.raises(RunFailedError, match=f"in the {component}, at boundary '{boundary}': X: x") as caught:
        FailureBudget(1).add(_failed("sums", boundary), is_live=is_live)
    assert component_of_error(caught.value) == component


def test_a_healthy_environment_hides_no_broken_one():
    budget = FailureBudget(3)
    for _ in range(2):
        budget.add(_failed("sums", Boundary.ALGORITHM))
        budget.add(make_rollout(env_name="letters"))
    with pytest.raises(RunFailedError, match="3 rollouts in a row failed in environment 'sums'") as caught:
        budget.add(_failed("sums", Boundary.ALGORITHM))
    assert component_of_error(caught.value) == "algorithm of environment 'sums'"


def test_a_part_that_all_environments_share_is_not_given_a_budget_for_each():
    budget = FailureBudget(3)
    budget.add(_failed("sums", Boundary.POLICY))
    budget.add(_failed("letters", Boundary.POLICY))
    with pytest.raises(RunFailedError, match="3 rollouts in a row failed; the last one"):
        budget.add(_failed("words", Boundary.POLICY))


def test_the_first_failure_of_each_kind_in_an_environment_is_logged(caplog):
    budget = FailureBudget(99)
    for rollout in (_failed("sums"), _failed("sums"), make_rollout(), _failed("letters"), _failed("sums", Boundary.ENV), _failed("sums")):
        budget.add(rollout)
    where = [(record.args[0], record.args[2]) for record in caplog.records]
    assert where == [("sums", "grader"), ("letters", "grader"), ("sums", "env")]
    assert caplog.messages[0].startswith("env 'sums', task ") and "the first of its kind: X: x;" in caplog.messages[0]


def test_the_traceback_of_such_a_failure_is_in_the_log_once(caplog):
    caplog.set_level("INFO")
    budget = FailureBudget(99)
    for _ in range(2):
        rollout = make_rollout(None, with_samples=False)
        try:
            raise RuntimeError("oops")
        except RuntimeError as error:
            rollout.fail(Boundary.ALGORITHM, error)
        budget.add(rollout)
    place = "(test_budgets.py, line "
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"RuntimeError: oops {place}" in caplog.messages[0]
    assert "Traceback" in caplog.messages[1] and caplog.messages[1].endswith("RuntimeError: oops")


def test_a_good_rollout_ends_the_row_of_its_own_environment_only():
    budget = FailureBudget(3)
    for env_name in ("sums", "letters"):
        budget.add(_failed(env_name, Boundary.ENV))
    budget.add(make_rollout(env_name="sums"))
    for env_name in ("letters", "sums"):
        budget.add(_failed(env_name, Boundary.ENV))
    budget.add(make_rollout(env_name="sums"))
    with pytest.raises(RunFailedError, match="in environment 'letters'"):
        budget.add(_failed("letters", Boundary.ENV))


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


def _spent(*entries) -> str:
    """Return what a budget of one batch says when these (rollout, bucket) were all that came of it."""
    tally = StepTally()
    for rollout, bucket in entries:
        rollout.bucket = bucket
        tally.add_rollout(0, rollout)
        tally.add_group([rollout])
    budget = EmptyBatchBudget(1)
    budget.add_batch(is_shipped=False)
    with pytest.raises(RunFailedError) as caught:
        budget.check(1, 4, tally)
    return str(caught.value)


def _credited(*, feeds_rl: bool):
    rollout = make_rollout(0.0)
    rollout.assign_advantages(0.0)
    if not feeds_rl:
        rollout.samples[0].rl_weights = np.zeros(5, np.float32)
        rollout.samples[0].ce_weights = rollout.samples[0].loss_mask.astype(np.float32)
    return rollout


def test_the_advice_is_about_what_took_the_rollouts_and_nothing_else():
    equal = _spent((_credited(feeds_rl=True), "filtered/zero_advantage"))
    assert "Equal rewards" in equal and "enforce" not in equal and "row_length" not in equal and "reward is not" not in equal
    imitated = _spent((_credited(feeds_rl=False), "filtered/min_reward"), (make_rollout(None), Bucket.UNSCORED))
    assert "Equal rewards" not in imitated and "`enforce`" in imitated and "0 if it has nothing to measure" in imitated
    failed = _spent((_failed(), Bucket.ERRORED), (make_rollout(), Bucket.OVERLONG_DROPPED))
    assert "at boundary 'grader': ZeroDivisionError: by zero" in failed and "trainer.row_length" in failed
    assert "Equal rewards" not in failed and "enforce" not in failed
    cut = _spent((make_rollout(), "filtered/truncated"))
    assert "set its `truncated` = 'train'" in cut and "enforce" not in cut
