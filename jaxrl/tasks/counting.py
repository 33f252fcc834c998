"""What every task sampler counts: groups, groups that carried a signal, rollouts, their cost.

In: the rewards and costs of one scored group at a time. Out: totals and the ratios that follow from them. A group
carries a signal if its rewards are not all equal. Counting never influences a draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxrl.tasks.saved import checked_count, checked_number


@dataclass(slots=True)
class GroupCounters:
    """Running totals of one task sampler."""

    groups: int = 0
    """Groups that were counted."""
    signal_groups: int = 0
    """Groups with two scored rollouts or more whose rewards differ."""
    unscored_groups: int = 0
    """Groups without a single reward."""
    episodes: int = 0
    """Rollouts of all groups, scored or not; the counters' public names say episode where the rest of the code says rollout."""
    scored_episodes: int = 0
    """Rollouts with a reward."""
    missing_rewards: int = 0
    """Rollouts without one."""
    cost: float | None = None
    """Sum of the costs; None until a group reports some."""

    def add(self, rewards: Sequence[float | None], costs: Sequence[float] | None) -> list[float]:
        """Count one group and return its rewards without the missing ones. Raises before anything is changed.

        Args:
          rewards: one per rollout, at least one; None or NaN where the environment gave none, which is never counted as
            zero.
          costs: one finite number >= 0 per rollout, or None; given for every group of a run or for none.

        Raises:
          ValueError: an argument is not of that kind, or costs are given for some groups only.
        """
        if len(rewards) == 0:
            raise ValueError("`rewards` is empty; a group has at least one rollout")
        scored = [float(reward) for reward in rewards if reward is not None and not math.isnan(reward)]
        if any(math.isinf(reward) for reward in scored):
            raise ValueError(f"`rewards` must be finite, None or NaN, got {list(rewards)!r}")
        has_costs, total = costs is not None, self.cost
        if self.groups and has_costs != (self.cost is not None):
            raise ValueError(f"costs are reported for every group or for none: the groups before had {'none' if has_costs else 'costs'}")
        if costs is not None:
            if len(costs) != len(rewards):
                raise ValueError(f"expected one cost per rollout ({len(rewards)}), got {len(costs)}")
            if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
                raise ValueError(f"`costs` must be finite and not negative, got {list(costs)!r}")
            try:
                total = (self.cost or 0.0) + math.fsum(costs)
            except OverflowError:
                total = math.inf
            if math.isinf(total):
                raise ValueError(f"the sum of all costs has become infinite with {list(costs)!r}")
        self.groups += 1
        self.signal_groups += len(scored) >= 2 and max(scored) > min(scored)
        self.unscored_groups += not scored
        self.episodes += len(rewards)
        self.scored_episodes += len(scored)
        self.missing_rewards += len(rewards) - len(scored)
        self.cost = total
        return scored

    def metrics(self) -> dict[str, float]:
        """Return the totals and the ratios that follow from them; what is undefined is absent."""
        values = {name: float(value) for name, value in asdict(self).items() if value is not None}
        if self.groups:
            values["zero_signal_fraction"] = 1.0 - self.signal_groups / self.groups
            values["signal_groups_per_episode"] = self.signal_groups / self.episodes
        if self.cost:
            values["signal_groups_per_cost"] = self.signal_groups / self.cost
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the totals as a JSON value."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Any) -> GroupCounters:
        """Return the counters of a saved state.

        Raises:
          ValueError: the state is not one of these counters, or a value of it none that they can have.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(state, dict) or set(state) != names:
            raise ValueError(f"a state of group counters has the keys {sorted(names)}, got {state!r}")
        for name, value in state.items():
            if name != "cost":
                checked_count(value, f"counter {name!r}")
        if state["cost"] is not None:
            checked_number(state["cost"], "counter 'cost'")
        return cls(**state)
