"""Credit from rewards: pure functions on the rewards of one group.

In: one finite reward per surviving rollout, or per turn of it. Out: one float32 number for each, computed in float64 and rounded once.
Rewards that are equal up to rounding give exact zeros in all of them. Which rollouts survive, which tokens take the
credit and what the loss does with it are decided elsewhere. Legend: G rollouts of a group, K turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

EQUAL_REWARDS_RTOL = 1e-9
"""Rewards this close, relative to the largest, are equal: far above float64 rounding, far below any difference a grader
means."""
EQUAL_REWARDS_ATOL = 1e-12
"""The same for rewards near 0, where a sum such as 0.3 - 0.2 - 0.1 leaves a residue."""
LARGEST_REWARD = 1e37
"""A reward further from 0 is refused: differences of such rewards, or their doubles, may not be float32 numbers."""


def rewards_are_equal(rewards_G: Sequence[float] | np.ndarray) -> bool:
    """Say whether a group's rewards are the same number up to float rounding, so that they carry no signal.

    Args:
      rewards_G: [G] finite rewards; G >= 0.

    Returns:
      True if they differ by rounding only; also for fewer than two rewards.

    Example:
      >>> rewards_are_equal([0.1 + 0.2, 0.3]), rewards_are_equal([0.3, 0.31]), rewards_are_equal([0.7])
      (True, False, True)
    """
    rewards = np.asarray(rewards_G, np.float64)
    if rewards.size < 2:
        return True
    return bool(np.ptp(rewards) <= max(EQUAL_REWARDS_ATOL, EQUAL_REWARDS_RTOL * np.abs(rewards).max()))


def group_mean_advantages(rewards_G: Sequence[float] | np.ndarray) -> np.ndarray:
    """Credit each rollout with its reward minus the group's mean.

    A_i = r_i - mean(r); not divided by the standard deviation, which would weigh easy and hard tasks by how little
    their rewards vary. A group with equal rewards, or of one rollout, gets exact zeros.

    Args:
      rewards_G: [G] finite rewards of the group's survivors; G >= 0.

    Returns:
      [G] float32 advantages of mean zero (up to rounding), in units of reward.

    Raises:
      ValueError: not one-dimensional, or a reward is not finite or beyond `LARGEST_REWARD`.

    Example:
      >>> group_mean_advantages([1.0, 0.0, 0.0, 1.0])
      array([ 0.5, -0.5, -0.5,  0.5], dtype=float32)
      >>> group_mean_advantages([0.1 + 0.2, 0.3])
      array([0., 0.], dtype=float32)

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1; without the division as in
      Liu et al. 2025, Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.
    """
    return _centred(_checked(rewards_G, "reward")).astype(np.float32)


def max_rl_advantages(rewards_G: Sequence[float] | np.ndarray) -> np.ndarray:
    """Credit each rollout with its reward minus the group's mean, divided by that mean.

    A_i = (r_i - m) / m with m = mean(r). For rewards of 0 and 1, m estimates how likely the policy is to succeed, and
    the division turns the gradient of that probability into the gradient of its logarithm: hard tasks weigh more. A
    group with equal rewards, of one rollout, or whose mean is not above 0, but for rounding, gets exact zeros.

    Args:
      rewards_G: [G] finite rewards of the group's survivors, which the method takes to be >= 0; G >= 0.

    Returns:
      [G] float32 advantages of mean zero (up to rounding), unitless, between -1 and G - 1.

    Raises:
      ValueError: not one-dimensional, a reward is not finite or beyond `LARGEST_REWARD`, or one is negative while the mean
        is above 0: a mean near 0 would then give credit without bound.

    Example:
      >>> max_rl_advantages([1.0, 0.0, 0.0, 0.0])
      array([ 3., -1., -1., -1.], dtype=float32)
      >>> max_rl_advantages([0.0, 0.0])
      array([0., 0.], dtype=float32)

    Reference: Maximum Likelihood Reinforcement Learning, 2026, https://arxiv.org/abs/2602.02710.
    """
    rewards = _checked(rewards_G, "reward")
    if rewards_are_equal(rewards) or rewards.mean() <= EQUAL_REWARDS_ATOL:
        return np.zeros(rewards.shape, np.float32)
    if rewards.min() < -EQUAL_REWARDS_ATOL:
        raise ValueError(
            f"max_rl divides by the group's mean reward, so rewards must not be negative: {rewards.tolist()}; shift or clip them in "
            "the environment, or use 'grpo' or 'rloo'"
        )
    mean = rewards.mean()
    return ((rewards - mean) / mean).astype(np.float32)


def leave_one_out_advantages(rewards_G: Sequence[float] | np.ndarray) -> np.ndarray:
    """Credit each rollout with its reward minus the mean of the group's other rollouts.

    A_i = r_i - (sum(r) - r_i) / (G - 1), computed as (r_i - mean(r)) * G / (G - 1): a baseline that does not contain
    the reward it is subtracted from leaves the policy gradient unbiased. A group with equal rewards, or of one rollout,
    gets exact zeros.

    Args:
      rewards_G: [G] finite rewards of the group's survivors; G >= 0.

    Returns:
      [G] float32 advantages of mean zero (up to rounding), in units of reward.

    Raises:
      ValueError: not one-dimensional, or a reward is not finite or beyond `LARGEST_REWARD`.

    Example:
      >>> leave_one_out_advantages([1.0, 0.0, 0.5])
      array([ 0.75, -0.75,  0.  ], dtype=float32)

    Reference: Ahmadian et al. 2024, Back to Basics: Revisiting REINFORCE Style Optimization,
      https://arxiv.org/abs/2402.14740.
    """
    centred_G = _centred(_checked(rewards_G, "reward"))
    # A group of one is 0 whatever the factor.
    return (centred_G * (len(centred_G) / max(1, len(centred_G) - 1))).astype(np.float32)


def efficiency_advantages(rewards_G: Sequence[float] | np.ndarray, costs_G: Sequence[float] | np.ndarray) -> np.ndarray:
    """Credit each rollout by its distance to the group's mean, after the cheap ones among the best were paid more.

    The best rollouts are those whose reward equals the largest one, up to rounding; c is the mean of their costs.
    s_i = r_i * (1 + clip(1 - cost_i / c, 0, 1)) for these, s_i = r_i for the others, and A_i = s_i - mean(s). So being
    cheap is worth something only to a rollout that is as good as any, and nobody gets less than it earned. Where no
    reward is above 0, or the best ones cost nothing, this is `group_mean_advantages`.

    Args:
      rewards_G: [G] finite rewards of the group's survivors; G >= 0.
      costs_G: [G] finite costs >= 0, in any unit (tokens, turns).

    Returns:
      [G] float32 advantages of mean zero (up to rounding), in units of reward.

    Raises:
      ValueError: not one-dimensional, of two lengths, a number is not finite, or a cost is negative.

    Example:
      >>> efficiency_advantages([1.0, 1.0, 0.0], [10, 30, 5])
      array([ 0.6666667 ,  0.16666667, -0.8333333 ], dtype=float32)

    Reference: the idea, with another shape of the bonus, in Arora and Zanette 2025, Training Language Models to Reason
      Efficiently, https://arxiv.org/abs/2502.04463.
    """
    rewards, costs = _checked(rewards_G, "reward"), _checked(costs_G, "cost")
    if rewards.shape != costs.shape:
        raise ValueError(f"expected one cost per reward, got {len(costs)} costs for {len(rewards)} rewards")
    if (costs < 0).any():
        raise ValueError(f"a cost is negative: {costs.tolist()}")
    if not rewards.size or rewards.max() <= 0:
        return group_mean_advantages(rewards)
    is_best = np.array([rewards_are_equal([reward, rewards.max()]) for reward in rewards])
    mean_cost = costs[is_best].mean()
    if mean_cost <= 0:
        return group_mean_advantages(rewards)
    bonus = np.clip(1.0 - costs / mean_cost, 0.0, 1.0)
    return group_mean_advantages(np.where(is_best, rewards * (1.0 + bonus), rewards))


def turn_advantages(rewards_G_K: Sequence[Sequence[float] | np.ndarray]) -> list[np.ndarray]:
    """Credit each turn with what it and the later turns of its rollout earned above the group's mean turn.

    A_{i,k} = sum over j >= k of (r_{i,j} - m), with m the mean of all turn rewards of the group; not divided by their
    standard deviation. What a turn earned is no merit of the turns after it. A group with equal turn rewards gets exact
    zeros, however many turns its rollouts have, and so does a sum that is 0 but for rounding.

    Args:
      rewards_G_K: for each of G surviving rollouts, its K_i finite turn rewards in order; G >= 0, K_i >= 0.

    Returns:
      For each rollout, [K_i] float32 advantages, in units of reward.

    Raises:
      ValueError: a rollout's rewards are not one-dimensional, or one is not finite or beyond `LARGEST_REWARD`.

    Example:
      >>> turn_advantages([[1.0, 0.0, 1.0], [0.0]])
      [array([0.5, 0. , 0.5], dtype=float32), array([-0.5], dtype=float32)]

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.3 (process supervision).
    """
    turns_G_K = [_checked(rewards_K, "turn reward", "turn, shape [K]") for rewards_K in rewards_G_K]
    if not turns_G_K:
        return []
    pooled = np.concatenate(turns_G_K)
    if rewards_are_equal(pooled):
        return [np.zeros(turns_K.shape, np.float32) for turns_K in turns_G_K]
    residue = max(EQUAL_REWARDS_ATOL, EQUAL_REWARDS_RTOL * np.abs(pooled).max())
    sums_G_K = [np.cumsum((turns_K - pooled.mean())[::-1])[::-1] for turns_K in turns_G_K]
    return [np.where(np.abs(sums_K) <= residue, 0.0, sums_K).astype(np.float32) for sums_K in sums_G_K]


def baseline_advantages(rewards_G: Sequence[float] | np.ndarray, baseline: float) -> np.ndarray:
    """Credit each rollout with its reward minus a baseline that was known before the group.

    A_i = r_i - b, exactly 0 where the two are equal up to rounding. Nothing makes the sum zero.

    Args:
      rewards_G: [G] finite rewards of the group's survivors; G >= 0.
      baseline: what was expected, finite, in units of reward.

    Returns:
      [G] float32 advantages, in units of reward.

    Raises:
      ValueError: not one-dimensional, or a number is not finite.

    Example:
      >>> baseline_advantages([1.0, 0.25, 0.1 + 0.2 - 0.05], 0.25)
      array([0.75, 0.  , 0.  ], dtype=float32)

    Reference: Williams 1992, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning,
      https://doi.org/10.1007/BF00992696.
    """
    rewards = _checked(rewards_G, "reward")
    is_equal = [rewards_are_equal([reward, baseline]) for reward in rewards]
    return np.where(is_equal, 0.0, rewards - checked_baseline(baseline, "baseline")).astype(np.float32)


def decayed_baseline(baseline: float, reward: float, decay: float) -> float:
    """Add a reward to an exponentially decaying mean: b' = decay * b + (1 - decay) * r.

    From 0, after n rewards that are all r, it is (1 - decay^n) * r: with decay 0.95, 64 % of the way after 20.

    Args:
      baseline: the mean so far, in units of reward.
      reward: a reward, or the mean of some.
      decay: share of the baseline that stays, in [0, 1).

    Returns:
      The new mean.

    Example:
      >>> round(decayed_baseline(0.05, 1.0, 0.95), 12)
      0.0975
    """
    return decay * baseline + (1.0 - decay) * reward


def checked_baseline(value: Any, name: str) -> float:
    """Return a baseline that was read from somewhere, or say what is wrong with it.

    Args:
      value: anything.
      name: what to call it.

    Raises:
      ValueError: not a finite number.

    Example:
      >>> checked_baseline(1, "baseline")
      1.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}")
    return float(value)


def _centred(rewards_G: np.ndarray) -> np.ndarray:
    """Return [G] float64 rewards minus their mean; exact zeros where they are equal."""
    return np.zeros_like(rewards_G) if rewards_are_equal(rewards_G) else rewards_G - rewards_G.mean()


def _checked(values_G: Sequence[float] | np.ndarray, noun: str, each: str = "rollout, shape [G]") -> np.ndarray:
    values = np.asarray(values_G, np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected one {noun} per {each}, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"a {noun} is not finite: {values.tolist()}; leave rollouts without a {noun} out of the group")
    if np.abs(values).max(initial=0.0) > LARGEST_REWARD:
        raise ValueError(f"a {noun} is further from 0 than {LARGEST_REWARD:g}: {values.tolist()}; credit is float32, so scale it down")
    return values
