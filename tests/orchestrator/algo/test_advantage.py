import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.orchestrator.algo.advantage import (
    baseline_advantages,
    decayed_baseline,
    efficiency_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    max_rl_advantages,
    rewards_are_equal,
    turn_advantages,
)


def shaped_at_equal_costs(rewards_G):
    return efficiency_advantages(rewards_G, np.full(np.shape(rewards_G), 0.1))


def shaped_by_position(rewards_G):
    return efficiency_advantages(rewards_G, np.arange(1, len(rewards_G) + 1))


GROUP_RELATIVE = [group_mean_advantages, max_rl_advantages, leave_one_out_advantages, shaped_at_equal_costs]
"""All of them are zero-mean and give exact zeros for equal rewards."""

REWARDS = st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=1, max_size=16)
"""Rewards as graders give them; two that differ do so visibly."""


@pytest.mark.parametrize(
    ("function", "rewards", "expected"),
    [
        (group_mean_advantages, [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
        (group_mean_advantages, [1.0, 0.5, 0.75, 0.75], [0.25, -0.25, 0.0, 0.0]),
        (group_mean_advantages, [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        (group_mean_advantages, [-2.0, 2.0], [-2.0, 2.0]),
        (max_rl_advantages, [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        (max_rl_advantages, [0.75, 0.25], [0.5, -0.5]),
        (max_rl_advantages, [-1.0, 1.0], [0.0, 0.0]),
        (leave_one_out_advantages, [1.0, 0.0, 0.5], [0.75, -0.75, 0.0]),
        (leave_one_out_advantages, [4.0, 1.0, 1.0, 2.0], [8 / 3, -4 / 3, -4 / 3, 0.0]),
        (shaped_by_position, [1.0, 0.0], [0.5, -0.5]),  # alone among the best, its cost is the mean: no bonus
        (shaped_by_position, [0.0, 1.0, 1.0], [-11 / 15, 7 / 15, 4 / 15]),  # costs 2 and 3, mean 5/2: shaped 0, 6/5, 1
    ],
)
def test_hand_computed_credit(function, rewards, expected):
    advantages = function(rewards)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=0)


EQUAL_UP_TO_ROUNDING = [
    [0.1 + 0.2, 0.3],
    [0.3, 0.1 + 0.2, 0.3],
    [0.7] * 7,
    [0.3 - 0.2 - 0.1, 0.0],
    [1e6 + 1e-5, 1e6],
    [float(np.float64(0.1) * 3), 0.3],
    [0.0, 0.0],
    [0.7],
    [],
]


@pytest.mark.parametrize("function", GROUP_RELATIVE)
@pytest.mark.parametrize("rewards", EQUAL_UP_TO_ROUNDING, ids=str)
def test_rewards_that_differ_by_rounding_only_give_exact_zeros(function, rewards):
    advantages = function(rewards)
    assert (advantages.dtype, advantages.tolist()) == (np.float32, [0.0] * len(rewards))


@pytest.mark.parametrize("rewards", [r for r in EQUAL_UP_TO_ROUNDING if r], ids=str)
def test_a_reward_that_equals_its_baseline_up_to_rounding_gives_exactly_zero(rewards):
    assert baseline_advantages(rewards, rewards[0]).tolist() == [0.0] * len(rewards)


def test_a_small_true_difference_is_kept():
    assert group_mean_advantages([0.5, 0.5 + 1e-6]).tolist() == pytest.approx([-5e-7, 5e-7], rel=1e-3)
    assert baseline_advantages([0.5 + 1e-6], 0.5).tolist() == pytest.approx([1e-6], rel=1e-3)
    assert not rewards_are_equal([0.0, 1e-9])


def test_one_outlier_among_equal_rewards_stays_bounded():
    assert np.abs(group_mean_advantages([0.0] + [0.95] * 7)).max() == pytest.approx(0.83125)
    assert np.abs(leave_one_out_advantages([0.0] + [0.95] * 7)).max() == pytest.approx(0.95)


def test_credit_is_rounded_once():
    assert group_mean_advantages([1e8 + 1.0, 1e8]).tolist() == [0.5, -0.5], "float32 rewards would have been equal"


@pytest.mark.parametrize(
    ("rewards", "costs", "shaped"),
    [
        pytest.param([1, 1, 0], [10, 30, 5], [1.5, 1, 0], id="mean cost of the right ones 20"),
        pytest.param([1, 1], [10, 30], [1.5, 1], id="all right"),
        pytest.param([1, 1, 1], [0, 10, 20], [2, 1, 1], id="free: twice the reward, and never more"),
        pytest.param([0.5, 0.5, 0.25], [10, 30, 1], [0.75, 0.5, 0.25], id="the best need not be 1"),
        pytest.param([0.1 + 0.2, 0.3, 0.0], [10, 30, 1], [0.45, 0.3, 0], id="best up to float noise"),
        pytest.param([1, 0, 0], [10, 1, 99], [1, 0, 0], id="alone: its own mean"),
        pytest.param([1, 1, 0], [0, 0, 5], [1, 1, 0], id="nothing cost anything"),
        pytest.param([0, 0, -1], [1, 2, 3], [0, 0, -1], id="no reward above 0"),
        pytest.param([-1, -2], [1, 2], [-1, -2], id="negative rewards"),
    ],
)
def test_only_the_cheap_among_the_best_are_paid_more(rewards, costs, shaped):
    expected = np.asarray(shaped) - np.mean(shaped)
    np.testing.assert_allclose(efficiency_advantages(rewards, costs), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        ([1.0], "expected one cost per reward, got 1 costs for 2 rewards"),
        ([1.0, -1.0], "a cost is negative"),
        ([1.0, float("nan")], "a cost is not finite"),
    ],
)
def test_costs_that_are_none_are_refused(costs, problem):
    with pytest.raises(ValueError, match=problem):
        efficiency_advantages([1.0, 0.0], costs)


@pytest.mark.parametrize("function", [*GROUP_RELATIVE, lambda rewards: baseline_advantages(rewards, 0.0)])
@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([1.0, float("nan")], "a reward is not finite"),
        ([1.0, float("inf")], "not finite"),
        ([1e308, 1e308, 0.0], r"further from 0 than 1e\+37: .* scale it down"),
        ([-2e37, 0.0], "further from 0"),
        (np.zeros((2, 2)), r"shape \[G\]"),
    ],
    ids=["nan", "inf", "sum overflows", "credit may overflow", "several groups in one array"],
)
def test_rewards_that_are_none_are_refused(function, rewards, problem):
    with pytest.raises(ValueError, match=problem):
        function(rewards)


@pytest.mark.parametrize("rewards", [[-1e-3, 1.0], [-1.0, 1.001], [-0.5, 0.0, 4.0]])
def test_max_rl_refuses_a_negative_reward_whose_credit_would_have_no_bound(rewards):
    with pytest.raises(ValueError, match="must not be negative"):
        max_rl_advantages(rewards)


def test_max_rl_lets_a_residue_below_0_pass_and_divides_by_none():
    assert max_rl_advantages([0.3 - 0.2 - 0.1, 1.0]).tolist() == [-1.0, 1.0]
    assert max_rl_advantages([-1e-12, 1.001e-12]).tolist() == [0.0, 0.0], "a mean of 5e-16 would give 2000"


@pytest.mark.parametrize("function", [*GROUP_RELATIVE[::2], shaped_by_position, lambda rewards: baseline_advantages(rewards, -1e37)])
def test_the_largest_rewards_give_finite_credit(function):
    assert np.isfinite(function([1e37, -1e37])).all() and np.isfinite(function([1e37] + [-1e37] * 63)).all()


def test_rewards_of_any_kind_of_number_are_the_same():
    kinds = [np.float32(1), np.int64(0), True, 0, 1.0]
    assert group_mean_advantages(kinds).tolist() == group_mean_advantages([1.0, 0.0, 1.0, 0.0, 1.0]).tolist()


def test_a_baseline_that_is_none_is_refused():
    with pytest.raises(ValueError, match="`baseline` must be a finite number, got nan"):
        baseline_advantages([1.0], float("nan"))


def test_a_decayed_baseline_forgets_where_it_began():
    baseline = 0.0
    for _ in range(20):
        baseline = decayed_baseline(baseline, 1.0, 0.95)
    assert baseline == pytest.approx(1 - 0.95**20) == pytest.approx(0.6415, abs=1e-4)
    assert decayed_baseline(123.0, 0.5, 0.0) == 0.5


@pytest.mark.parametrize("function", [*GROUP_RELATIVE, shaped_by_position])
@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS)
def test_credit_within_a_group_sums_to_zero(function, rewards):
    advantages = function(rewards)
    largest = max(1.0, float(np.abs(advantages).max()))
    assert float(advantages.sum(dtype=np.float64)) == pytest.approx(0.0, abs=1e-6 * len(rewards) * largest)


@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS, random=st.randoms())
def test_credit_follows_a_rollout_wherever_it_stands_in_its_group(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    costs = np.arange(1, len(rewards) + 1)
    for function in GROUP_RELATIVE:
        np.testing.assert_allclose(function([rewards[i] for i in order]), function(rewards)[order], rtol=1e-6, atol=1e-6)
    shuffled = efficiency_advantages([rewards[i] for i in order], costs[order])
    np.testing.assert_allclose(shuffled, efficiency_advantages(rewards, costs)[order], rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS, scale=st.floats(0.01, 100))
def test_credit_scales_with_the_rewards_except_that_of_max_rl_which_does_not_know_their_scale(rewards, scale):
    scaled = [scale * reward for reward in rewards]
    for function in (group_mean_advantages, leave_one_out_advantages, shaped_by_position):
        np.testing.assert_allclose(function(scaled), scale * function(rewards), rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(max_rl_advantages(scaled), max_rl_advantages(rewards), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS)
def test_max_rl_is_bounded_and_leave_one_out_is_grpo_up_to_a_factor(rewards):
    num_rollouts = len(rewards)
    relative = max_rl_advantages(rewards)
    assert relative.min() >= -1 - 1e-6 and relative.max() <= num_rollouts - 1 + 1e-5
    factor = num_rollouts / max(1, num_rollouts - 1)
    np.testing.assert_allclose(leave_one_out_advantages(rewards), factor * group_mean_advantages(rewards), rtol=1e-5, atol=1e-7)


TURNS = [
    # turn rewards of each rollout, credit of each turn
    pytest.param([[1.0, 0.0, 1.0], [0.0]], [[0.5, 0.0, 0.5], [-0.5]], id="mean 0.5: .5 - .5 + .5, - .5 + .5, .5"),
    pytest.param([[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.5], [0.0, -0.5]], id="equal sums: what differs is when it was earned"),
    pytest.param([[3.0], [1.0]], [[1.0], [-1.0]], id="one turn each: the reward minus the mean"),
    pytest.param([[2.0, -2.0], [], [1.0]], [[5 / 3 - 7 / 3, -7 / 3], [], [2 / 3]], id="mean 1/3, and a rollout without turns"),
    pytest.param([[0.7, 0.7], [0.7], [0.7] * 3], [[0, 0], [0], [0, 0, 0]], id="equal rewards, however many turns"),
    pytest.param([[0.1 + 0.2, 0.3], [0.3]], [[0, 0], [0]], id="equal up to float noise"),
    pytest.param([[0.1, 0.3, 0.2], [0.2]], [[0, 0.1, 0], [0]], id="a sum that is 0 but for float noise: - .1 + .1 + 0"),
    pytest.param([[1.0]], [[0.0]], id="alone"),
    pytest.param([], [], id="nobody"),
]


@pytest.mark.parametrize(("rewards", "expected"), TURNS)
def test_a_turn_is_credited_with_what_it_and_the_later_ones_earned_above_the_mean_turn(rewards, expected):
    advantages = turn_advantages(rewards)
    assert [a.dtype for a in advantages] == [np.float32] * len(rewards)
    for found, wanted in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)  # zeros are exact


@given(st.lists(st.lists(st.integers(0, 1000).map(lambda n: n / 1000), max_size=5), max_size=6))
def test_the_first_turns_credit_is_the_sum_over_all_turns_and_these_sum_to_zero(rewards):
    advantages = turn_advantages(rewards)
    turns = [len(r) for r in rewards]
    assert [len(a) for a in advantages] == turns
    assert sum(float(a[0]) for a in advantages if len(a)) == pytest.approx(0, abs=1e-5)


def test_a_turn_reward_that_is_none_is_refused():
    with pytest.raises(ValueError, match="a turn reward is not finite"):
        turn_advantages([[1.0], [float("nan")]])
