"""A group on its way: from its draw until its rollouts are decided.

Records only: the dispatcher makes and ends an `OpenGroup`, the sink turns it into a `KeptGroup`, the batcher holds
that. The group itself (`types.Group`) knows nothing of tasks, order or environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.types import Group, Rollout


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group from its draw until its rollouts are decided."""

    order: int
    """Position in the order of draws of this process."""
    draw: Draw
    env: TrainEnv
    group: Group
    """Holds the rollouts that arrived."""
    members: list[Rollout]
    """All rollouts, arrived or not, in member order."""
    opened_at_s: float
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """One per rollout."""
    is_dropped: bool = False
    before: OpenGroup | None = None
    """The group drawn before it, as long as its turn depends on that one."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the group is credited, or dropped."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the survivors' tokens; None if no live policy sampled any."""
        return _oldest(self.group.survivors)


@dataclass(slots=True, eq=False)
class KeptGroup:
    """A group that waits for a batch."""

    source: OpenGroup
    rollouts: list[Rollout]
    """At least one, in member order."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample) for rollout in self.rollouts for sample in rollout.samples)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the rollouts' tokens; None if no live policy sampled them."""
        return _oldest(self.rollouts)


def _oldest(rollouts: Iterable[Rollout]) -> int | None:
    return min((r.oldest_version for r in rollouts if r.oldest_version is not None), default=None)
