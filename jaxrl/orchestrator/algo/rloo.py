"""RLOO: a rollout's credit is its reward minus the mean of the other survivors of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import LossType
from jaxrl.orchestrator.algo.advantage import leave_one_out_advantages
from jaxrl.orchestrator.algo.base import Algorithm, assign_each
from jaxrl.types import Rollout


class RLOO(Algorithm):
    """REINFORCE with a leave-one-out baseline.

    Reference: Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740.
    """

    action_loss_type: ClassVar[LossType] = "rl"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus the mean of the others' rewards."""
        assign_each(rollouts, leave_one_out_advantages([rollout.score for rollout in rollouts]))
