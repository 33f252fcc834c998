"""REINFORCE: a rollout's credit is its reward minus a running mean of the environment's earlier groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl.config.algorithm import LossType, ReinforceConfig
from jaxrl.orchestrator.algo.advantage import baseline_advantages, checked_baseline, decayed_baseline
from jaxrl.orchestrator.algo.base import Algorithm, AlgorithmContext, assign_each
from jaxrl.orchestrator.ports import ScoringPolicy
from jaxrl.types import Rollout


class Reinforce(Algorithm):
    """REINFORCE with a baseline that decays exponentially, one per environment; needs no group.

    The baseline starts at 0: the first group's credit is its rewards as they are, and the baseline is 64 % of the way
    to their mean after 20 groups with the default decay. Every rollout of a group is compared with the baseline as it
    was before the group, which then takes in the group's mean. Groups count in the order in which they are credited:
    that of their draws in a synchronous run.

    Reference: Williams 1992, https://doi.org/10.1007/BF00992696.
    """

    config: ReinforceConfig
    action_loss_type: ClassVar[LossType] = "rl"

    def __init__(self, config: ReinforceConfig, policy_pool: ScoringPolicy, context: AlgorithmContext | None = None) -> None:
        super().__init__(config, policy_pool, context)
        self.baseline = 0.0
        """Decayed mean of the groups' mean rewards."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus baseline, then move the baseline."""
        rewards_G = [rollout.score for rollout in rollouts]
        assign_each(rollouts, baseline_advantages(rewards_G, self.baseline))
        self.baseline = decayed_baseline(self.baseline, float(np.mean(rewards_G)), self.config.decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the baseline."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved baseline.

        Raises:
          ValueError: the state is not one of this algorithm.
        """
        if set(state) != {"baseline"}:
            raise ValueError(f"`reinforce` remembers its `baseline`, but the state to restore has {sorted(state)}")
        self.baseline = checked_baseline(state["baseline"], "baseline")
