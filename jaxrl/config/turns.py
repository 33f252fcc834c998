"""How conversations of more than one turn go on, and when they end."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxrl.config.base import Section

History = Literal["template", "keep"]
"""What a later turn makes of what was said before: `template` follows the model's chat template, and where that rewrites
history (drops earlier thinking) the rollout forks into another branch; `keep` always continues the very tokens that the model saw."""

Truncated = Literal["train", "mask", "drop"]
"""What becomes of a rollout that a limit cut short: `train` treats it like any other, `mask` lets it count in its group's baseline and
trains none of its sampled tokens, `drop` leaves it out of the group too."""


class BudgetConfig(Section):
    """When a conversation is ended though its environment would go on; what is reached is the rollout's `stop_reason`."""

    max_turns: int = Field(default=8, ge=1)
    """Replies of the policy; reaching it is the stop reason `max_turns`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy may write in all turns together (`max_completion_tokens`); null sets no limit but the window."""
    max_duration_s: float | None = Field(default=None, gt=0)
    """Seconds after which no further turn begins (`max_duration`); null sets none but `rollout_deadline_s`, which is an error."""

    def reached(self, *, num_turns: int, num_tokens: int, duration_s: float) -> str | None:
        """Return the limit that so many turns, sampled tokens or seconds reach, as a stop reason; None if they reach none.

        Example:
          >>> budget = BudgetConfig(max_turns=3, max_completion_tokens=100)
          >>> budget.reached(num_turns=2, num_tokens=99, duration_s=5.0), budget.reached(num_turns=2, num_tokens=100, duration_s=5.0)
          (None, 'max_completion_tokens')
        """
        if num_turns >= self.max_turns:
            return "max_turns"
        if self.max_completion_tokens is not None and num_tokens >= self.max_completion_tokens:
            return "max_completion_tokens"
        if self.max_duration_s is not None and duration_s >= self.max_duration_s:
            return "max_duration"
        return None
