"""GRPO: a rollout's credit is its reward minus the mean of its group's survivors, the same on every sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import LossType
from jaxrl.orchestrator.algo.advantage import group_mean_advantages
from jaxrl.orchestrator.algo.base import Algorithm
from jaxrl.types import Rollout


class GRPO(Algorithm):
    """Group-relative policy optimisation without division by the standard deviation.

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """

    action_loss_type: ClassVar[LossType] = "rl"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus group mean."""
        advantages_G = group_mean_advantages([rollout.score for rollout in rollouts])
        for rollout, advantage in zip(rollouts, advantages_G, strict=True):
            rollout.assign_advantages(float(advantage))
