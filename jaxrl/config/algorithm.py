"""How credit is given: one config class per algorithm, told apart by `type`.

Beside its settings a class says, as class variables, what a configuration can be checked for without the algorithm
itself.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxrl.config.base import Section


class GRPOConfig(Section):
    """Group-relative policy optimisation: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Which algorithm: `grpo`."""
    action_loss_type: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"
    """The loss component that the sampled tokens feed; the algorithm's own class says the same."""
    is_group_relative: ClassVar[bool] = True
    """True if a rollout's credit comes from comparing it with the rest of its group."""


AlgorithmConfig = GRPOConfig
