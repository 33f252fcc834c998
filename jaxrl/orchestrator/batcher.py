"""Holds the groups that wait for a batch and hands out one step's worth.

In: groups with the rollouts that passed the filters, in commit order. Out: whole groups, oldest first: a group is never
split over two steps. A step's target is counted in groups or in tokens; a group counts as one however many of its
rollouts are left. Nothing here knows a deadline, a filter or the trainer.
"""

from __future__ import annotations

import math
from collections import deque

from jaxrl.config.orchestrator import OrchestratorConfig
from jaxrl.orchestrator.groups import KeptGroup
from jaxrl.orchestrator.rules import is_stale

SMOOTHING = 0.1
"""Weight of the newest group in the running mean of tokens per group."""


class Batcher:
    """A queue of groups with a target."""

    def __init__(self, *, groups: int | None = None, tokens: int | None = None, tokens_per_group: float = 1.0) -> None:
        """Open an empty queue.

        Args:
          groups: groups of one step, or
          tokens: tokens of one step; exactly one of the two.
          tokens_per_group: first guess of a group's tokens, until groups were seen.
        """
        needed = tokens if groups is None else groups
        assert needed is not None and (groups is None or tokens is None), "a step is counted in groups or in tokens"
        self.needed = needed
        """Size of one step, in groups or in tokens."""
        self._is_in_groups = groups is not None
        self._tokens_per_group = tokens_per_group
        self._has_seen_group = False
        self._queue: deque[KeptGroup] = deque()

    @property
    def kept(self) -> int:
        """Size of what waits."""
        return sum(self._size(group) for group in self._queue)

    @property
    def waiting(self) -> list[KeptGroup]:
        """The groups that wait, oldest first."""
        return list(self._queue)

    @property
    def groups_per_step(self) -> int:
        """Groups that a step takes, an estimate when steps are counted in tokens."""
        return self.needed if self._is_in_groups else max(1, math.ceil(self.needed / self._tokens_per_group))

    def expected_size(self, num_groups: int) -> float:
        """Return the expected size of groups that are still being played."""
        return float(num_groups) if self._is_in_groups else num_groups * self._tokens_per_group

    def add(self, group: KeptGroup) -> None:
        """Queue a group."""
        assert group.rollouts, f"group {group.source.group.id!r} has no rollout left and must not take a place"
        self._queue.append(group)
        newest = float(group.num_tokens)
        if self._has_seen_group:
            newest = (1 - SMOOTHING) * self._tokens_per_group + SMOOTHING * newest
        self._tokens_per_group = max(1.0, newest)
        self._has_seen_group = True

    def pop_stale(self, step: int, max_staleness_steps: int) -> list[KeptGroup]:
        """Remove and return the groups that are too old to be trained on at `step`."""
        stale: list[KeptGroup] = []
        fresh: deque[KeptGroup] = deque()
        for group in self._queue:
            (stale if is_stale(step, group.oldest_version, max_staleness_steps) else fresh).append(group)
        self._queue = fresh
        return stale

    def take(self, *, everything: bool) -> list[KeptGroup]:
        """Remove and return one step's groups, oldest first.

        Args:
          everything: take all that waits, so that nothing is left over for a later version of the policy.
        """
        taken: list[KeptGroup] = []
        size = 0
        while self._queue and (everything or size < self.needed):
            group = self._queue.popleft()
            size += self._size(group)
            taken.append(group)
        return taken

    def state_dict(self) -> dict[str, float | bool]:
        """Return the estimate of tokens per group; the queue itself is played again after a restart."""
        return {"tokens_per_group": self._tokens_per_group, "has_seen_group": self._has_seen_group}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Restore the estimate."""
        self._tokens_per_group = float(state["tokens_per_group"])
        self._has_seen_group = bool(state["has_seen_group"])

    def _size(self, group: KeptGroup) -> int:
        return 1 if self._is_in_groups else group.num_tokens


def build_batcher(config: OrchestratorConfig, row_length: int) -> Batcher:
    """Return the batcher of a run; until a group was seen, one is taken to fill a row with each of its rollouts."""
    rollouts = config.rollouts_per_step
    return Batcher(
        groups=None if rollouts is None else rollouts // config.group_size,
        tokens=config.token_batch_size,
        tokens_per_group=config.group_size * row_length,
    )
