"""How credit is given: one config class per algorithm, told apart by `type`."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxrl.config.base import Section


class GRPOConfig(Section):
    """Group-relative policy optimisation: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Tag of this algorithm."""
    action_loss_type: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    is_group_relative: ClassVar[bool] = True


AlgorithmConfig = GRPOConfig
