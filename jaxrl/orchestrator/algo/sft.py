"""SFT: every token that a frozen model, or the environment itself, answered is learnt by cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import LossType
from jaxrl.orchestrator.algo.advantage import group_mean_advantages
from jaxrl.orchestrator.algo.base import Algorithm, assign_each
from jaxrl.types import Rollout


class SFT(Algorithm):
    """Supervised fine-tuning on rollouts of somebody else than the policy.

    The credit that it writes trains nothing, because the routing gives these tokens no rl weight; it is there for
    filters, gates and metrics, which then see which replies were better than the rest of their group.
    """

    action_loss_type: ClassVar[LossType] = "ce"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus group mean, for those who look at it."""
        assign_each(rollouts, group_mean_advantages([rollout.score for rollout in rollouts]))
