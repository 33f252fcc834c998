"""Opens groups and plays their rollouts, each in a task of its own.

In: the order to open a group, or to drop one. Out: every rollout to the sink exactly once, unless its whole group was
dropped. Whether a group may be opened is the orchestrator's question; what a rollout is worth is the sink's.

Invariant: a group is in `in_flight` from its draw until it is committed or dropped, and it always ends: full, partial
or dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.draws import DrawSource
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.tasks import task_of
from jaxrl.types import Group, Rollout


class Arrivals(Protocol):
    """Where rollouts arrive."""

    def expect(self, opened: OpenGroup) -> None:
        """Say that the rollouts of a group will come."""
        ...

    async def add(self, opened: OpenGroup, rollout: Rollout) -> None:
        """Take a played rollout."""
        ...


class Dispatcher:
    """The groups in flight."""

    def __init__(
        self,
        envs: Sequence[TrainEnv],
        source: DrawSource,
        arrivals: Arrivals,
        ledger: Ledger,
        *,
        group_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._envs = {env.name: env for env in envs}
        self._source = source
        self._arrivals = arrivals
        self._ledger = ledger
        self._group_size = group_size
        self._clock = clock
        self._num_opened = 0
        self.in_flight: dict[str, OpenGroup] = {}
        """Groups by id, in draw order."""

    def open(self, version: int, tasks: asyncio.TaskGroup) -> OpenGroup:
        """Draw a task and start its rollouts.

        Args:
          version: the policy version that plays.
          tasks: owner of the rollouts' tasks.
        """
        draw = self._source.draw()
        env = self._envs[draw.env_name]
        task = task_of(env.name, draw.spec)
        group = Group(f"{env.name}/{draw.draw_index}", task, draw.draw_index, size=self._group_size, version=version)
        members = [Rollout(task, group.id, member, draw.draw_index) for member in range(self._group_size)]
        opened = OpenGroup(self._num_opened, draw, env, group, members, self._clock())
        self._num_opened += 1
        self.in_flight[group.id] = opened
        self._ledger.dispatch(len(members))
        self._arrivals.expect(opened)
        opened.tasks = [
            tasks.create_task(self._play(opened, r), name=f"rollout {group.id}/{r.member}") for r in members
        ]
        return opened

    def release(self, opened: OpenGroup) -> None:
        """Forget a group whose rollouts were decided."""
        del self.in_flight[opened.group.id]

    def drop(self, opened: OpenGroup) -> None:
        """Cancel what still plays of a group and forget it; nothing of it will arrive any more."""
        opened.is_dropped = True
        opened.finished.set()
        self.release(opened)
        for task in opened.tasks:
            task.cancel()

    async def _play(self, opened: OpenGroup, rollout: Rollout) -> None:
        await opened.env.sampler.play(rollout)
        await self._arrivals.add(opened, rollout)
