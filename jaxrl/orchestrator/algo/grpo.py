"""GRPO: a rollout's credit is its reward minus the mean of its group's survivors, the same on every sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import GRPOConfig, LossType
from jaxrl.orchestrator.algo.base import Algorithm
from jaxrl.orchestrator.algo.group_credit import credit_by_group_mean
from jaxrl.types import Rollout


class GRPO(Algorithm):
    """Group-relative policy optimisation without division by the standard deviation.

    With a `length_penalty`, the cheaper among a group's best rollouts count up to twice their reward. With `credit` by
    turn, each turn has a credit of its own, from the rewards of turns.

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """

    config: GRPOConfig
    action_loss_type: ClassVar[LossType] = "rl"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus group mean."""
        credit_by_group_mean(rollouts, self.config)
