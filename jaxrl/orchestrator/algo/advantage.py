"""Credit from rewards: pure functions on the rewards of one group.

In: one finite reward per surviving rollout. Out: one float32 number per rollout. Which rollouts survive, which tokens
take the credit and what the loss does with it are decided elsewhere. Legend: G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EQUAL_REWARDS_RTOL = 1e-9
"""Rewards this close, relative to the largest, are equal: far above float64 rounding, far below any difference a grader
means."""
EQUAL_REWARDS_ATOL = 1e-12
"""The same for rewards near 0, where a sum such as 0.3 - 0.2 - 0.1 leaves a residue."""


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

    A_i = r_i - mean(r), in float64 and then rounded once; not divided by the standard deviation, which would weigh easy
    and hard tasks by how little their rewards vary. A group with equal rewards, or of one rollout, gets exact zeros.

    Args:
      rewards_G: [G] finite rewards of the group's survivors; G >= 0.

    Returns:
      [G] float32 advantages of mean zero (up to rounding), in units of reward.

    Raises:
      ValueError: not one-dimensional, or a reward is not finite.

    Example:
      >>> group_mean_advantages([1.0, 0.0, 0.0, 1.0])
      array([ 0.5, -0.5, -0.5,  0.5], dtype=float32)
      >>> group_mean_advantages([0.1 + 0.2, 0.3])
      array([0., 0.], dtype=float32)

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1; without the division as in
      Liu et al. 2025, Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.
    """
    rewards = np.asarray(rewards_G, np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"expected one reward per rollout, shape [G], got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"a reward is not finite: {rewards.tolist()}; leave rollouts without a reward out of the group"
        )
    if rewards_are_equal(rewards):
        return np.zeros(rewards.shape, np.float32)
    return (rewards - rewards.mean()).astype(np.float32)
