import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.orchestrator.algo.advantage import group_mean_advantages, rewards_are_equal


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
        ([1.0, 0.5, 0.75, 0.75], [0.25, -0.25, 0.0, 0.0]),
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([-2.0, 2.0], [-2.0, 2.0]),
        ([0.7], [0.0]),
        ([], []),
    ],
)
def test_credit_is_the_reward_minus_the_groups_mean(rewards, expected):
    advantages = group_mean_advantages(rewards)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == expected


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3],
        [0.3, 0.1 + 0.2, 0.3],
        [0.7] * 7,
        [0.3 - 0.2 - 0.1, 0.0],
        [1e6 + 1e-5, 1e6],
        [float(np.float64(0.1) * 3), 0.3],
    ],
)
def test_rewards_that_differ_by_rounding_only_give_exact_zeros(rewards):
    assert group_mean_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_a_small_true_difference_is_kept():
    assert group_mean_advantages([0.5, 0.5 + 1e-6]).tolist() == pytest.approx([-5e-7, 5e-7], rel=1e-3)
    assert not rewards_are_equal([0.0, 1e-9])


def test_one_outlier_among_equal_rewards_stays_bounded():
    advantages = group_mean_advantages([0.0] + [0.95] * 7)
    assert np.abs(advantages).max() == pytest.approx(0.83125)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        group_mean_advantages([1.0, bad])


def test_rewards_of_several_groups_in_one_array_are_refused():
    with pytest.raises(ValueError, match=r"shape \[G\]"):
        group_mean_advantages(np.zeros((2, 2)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=16), st.randoms())
def test_advantages_sum_to_zero_and_do_not_depend_on_the_order(rewards, random):
    advantages = group_mean_advantages(rewards)
    assert float(np.sum(advantages, dtype=np.float64)) == pytest.approx(0.0, abs=1e-3)
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = group_mean_advantages([rewards[i] for i in order])
    np.testing.assert_allclose(shuffled, advantages[order], rtol=1e-5, atol=1e-5)
