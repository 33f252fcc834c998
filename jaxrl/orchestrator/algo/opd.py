"""OPD: the policy plays, and a frozen teacher says how likely it finds each of the policy's tokens. No credit is given."""

from __future__ import annotations

from typing import ClassVar

from jaxrl.config.algorithm import LossType, OPDConfig
from jaxrl.orchestrator.algo.base import Algorithm
from jaxrl.orchestrator.algo.reference import score_branches
from jaxrl.types import Rollout


class OPD(Algorithm):
    """On-policy distillation: the ref_kl loss moves each sampled token towards what the teacher says of it.

    Reference: Agarwal et al. 2023, On-Policy Distillation of Language Models, https://arxiv.org/abs/2306.13649; with the
      reverse KL on sampled tokens as in Gu et al. 2023, MiniLLM, https://arxiv.org/abs/2306.08543.
    """

    config: OPDConfig
    action_loss_type: ClassVar[LossType] = "ref_kl"

    async def setup(self) -> None:
        """Connect the teacher; see `connect` for what it raises."""
        self.teacher = await self.connect(self.config.teacher, "teacher")

    async def score_rollout(self, rollout: Rollout) -> None:
        """Let the teacher score the very ids of every branch."""
        await score_branches(self.teacher, rollout)
