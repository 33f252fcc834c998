"""RAE: a rollout's credit is its reward minus a running mean of what the same agent got before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl.config.algorithm import LossType, RAEConfig
from jaxrl.errors import EnvError
from jaxrl.orchestrator.algo.advantage import baseline_advantages, checked_baseline, decayed_baseline
from jaxrl.orchestrator.algo.base import Algorithm, AlgorithmContext, assign_each
from jaxrl.orchestrator.ports import ScoringPolicy
from jaxrl.types import Rollout

DEFAULT_AGENT = "policy"
"""The agent of a rollout whose environment names none."""


class RAE(Algorithm):
    """Role-conditioned advantage estimation: one exponentially decaying baseline per agent; needs no group.

    Where the policy plays several roles, such as the two sides of a game, one mean over all of them would credit a role
    for being the easier one. The environment names the agent in `info["agent"]`. Every baseline starts at 0, so an
    agent's first rollout is credited with its reward. In member order, each rollout is compared with its agent's
    baseline, which then takes in its reward.

    Reference: Liu et al. 2025, SPIRAL, https://arxiv.org/abs/2506.24119.
    """

    config: RAEConfig
    action_loss_type: ClassVar[LossType] = "rl"

    def __init__(self, config: RAEConfig, policy_pool: ScoringPolicy, context: AlgorithmContext | None = None) -> None:
        super().__init__(config, policy_pool, context)
        self.baselines: dict[str, float] = {}
        """Decayed mean reward by agent; an agent that is not here was not met and has 0."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Assign reward minus the agent's baseline, moving that baseline from rollout to rollout."""
        moved, advantages = dict(self.baselines), []
        for rollout in rollouts:
            agent = _agent_of(rollout)
            baseline = moved.get(agent, 0.0)
            advantages.append(baseline_advantages([rollout.score], baseline))
            moved[agent] = decayed_baseline(baseline, rollout.score, self.config.decay)
        assign_each(rollouts, np.concatenate(advantages))
        self.baselines = moved  # only now: a group that cannot be credited leaves no trace

    def state_dict(self) -> dict[str, Any]:
        """Return the baseline of every agent met so far."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved baselines.

        Raises:
          ValueError: the state is not one of this algorithm.
        """
        if set(state) != {"baselines"} or not isinstance(state["baselines"], dict):
            raise ValueError(f"`rae` remembers `baselines` by agent, but the state to restore is {state!r}")
        self.baselines = {str(agent): checked_baseline(value, f"baselines.{agent}") for agent, value in state["baselines"].items()}


def _agent_of(rollout: Rollout) -> str:
    agent = rollout.info.get("agent", DEFAULT_AGENT)
    if not isinstance(agent, str) or not agent:
        raise EnvError(f"env {rollout.env_name!r}: `info['agent']` must be the name of the agent that played, got {agent!r}")
    return agent
