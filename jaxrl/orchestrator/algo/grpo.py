"""GRPO: a rollout's credit is its reward minus the mean of its group's survivors, the same on every sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jaxrl.config.algorithm import GRPOConfig, LengthPenaltyConfig, LossType, TurnsPenaltyConfig
from jaxrl.orchestrator.algo.advantage import efficiency_advantages, group_mean_advantages
from jaxrl.orchestrator.algo.base import Algorithm, assign_each
from jaxrl.types import Rollout


class GRPO(Algorithm):
    """Group-relative policy optimisation without division by the standard deviation.

    With a `length_penalty`, the cheaper among a group's best rollouts count up to twice their reward.

    Reference: Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """

    config: GRPOConfig
    action_loss_type: ClassVar[LossType] = "rl"

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus group mean."""
        rewards_G = [rollout.score for rollout in rollouts]
        penalty = self.config.length_penalty
        if penalty is None:
            advantages_G = group_mean_advantages(rewards_G)
        else:
            advantages_G = efficiency_advantages(rewards_G, [_cost(rollout, penalty) for rollout in rollouts])
        assign_each(rollouts, advantages_G)


def _cost(rollout: Rollout, penalty: LengthPenaltyConfig) -> float:
    """Return what a rollout cost: its turns, or its weighted tokens, those of a node that branches share counted once."""
    if isinstance(penalty, TurnsPenaltyConfig):
        return float(rollout.num_turns)
    tool_tokens = sum(len(node.token_ids) for node in rollout.nodes if node.role == "tool")
    return penalty.completion_weight * rollout.num_completion_tokens + penalty.tool_response_weight * tool_tokens
