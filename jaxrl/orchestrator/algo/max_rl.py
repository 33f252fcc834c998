"""MaxRL: a rollout's credit is its reward relative to the mean of its group's survivors, so that hard tasks weigh more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import LossType
from jaxrl.orchestrator.algo.advantage import max_rl_advantages
from jaxrl.orchestrator.algo.base import Algorithm, assign_each
from jaxrl.types import Rollout


class MaxRL(Algorithm):
    """Maximum-likelihood reinforcement learning; needs rewards that are not negative.

    A group in which nobody succeeded teaches nothing, and neither does one in which everybody did.

    Reference: Maximum Likelihood Reinforcement Learning, 2026, https://arxiv.org/abs/2602.02710.
    """

    action_loss_type: ClassVar[LossType] = "rl"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign (reward minus group mean) / group mean."""
        assign_each(rollouts, max_rl_advantages([rollout.score for rollout in rollouts]))
