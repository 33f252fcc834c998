"""`Rollout`: its branches, its failure, its credit."""

import numpy as np
import pytest

from jaxrl.errors import SampleError
from jaxrl.types import Boundary, Rollout
from tests.builders import make_node, make_rollout


def forked() -> Rollout:
    """A question and a reply; then a second question with two replies, and a root of its own."""
    rollout = make_rollout()
    second = make_node(1, [6])
    replies = [make_node(2, [7], num_sampled=1, content="a"), make_node(2, [8], num_sampled=1, content="b")]
    rollout.nodes += [second, *replies, make_node(None, [9], content="alone")]
    return rollout


def test_every_leaf_ends_a_branch_that_begins_at_a_root() -> None:
    rollout = forked()
    assert rollout.leaves == [3, 4, 5]
    assert [rollout.path_to(leaf) for leaf in rollout.leaves] == [(0, 1, 2, 3), (0, 1, 2, 4), (5,)]
    assert rollout.path_to(1) == (0, 1)


def test_a_failed_rollout_has_no_reward_and_keeps_its_first_failure() -> None:
    rollout = make_rollout(1.0)
    rollout.fail(Boundary.GRADER, ZeroDivisionError("by zero"))
    rollout.fail(Boundary.ALGORITHM, "too late", kind="Late")
    assert rollout.reward is None and not rollout.is_scored
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.type, rollout.failure.message) == ("grader", "ZeroDivisionError", "by zero")


def test_a_failure_without_words_still_says_what_was_raised() -> None:
    rollout = make_rollout()
    rollout.fail(Boundary.TIMEOUT, TimeoutError())
    assert rollout.failure is not None and rollout.failure.message == "TimeoutError()"


@pytest.mark.parametrize("values", [float("nan"), [0.0] * 4, [1.0, 0.0, 0.5, 0.5, 0.5]])
def test_credit_that_is_not_finite_of_another_length_or_off_the_loss_mask_is_refused(values: float | list[float]) -> None:
    with pytest.raises(SampleError):
        make_rollout().assign_advantages(values)


def test_credit_is_a_number_for_every_sampled_token_or_one_number_for_each_token() -> None:
    rollout = make_rollout()
    assert rollout.mean_advantage() is None, "never assigned is not zero"
    rollout.assign_advantages(0.5)
    np.testing.assert_array_equal(rollout.samples[0].advantages, np.float32([0, 0, 0.5, 0.5, 0.5]))
    rollout.assign_advantages([0, 0, 1, 2, 3])
    assert rollout.mean_advantage() == 2.0
    rollout.is_frozen = True
    with pytest.raises(SampleError, match="frozen"):
        rollout.assign_advantages(0.5)
