"""Tasks sorted into pools by what their last group was worth, each pool with a share of the draws.

In: a task list, pools with an upper bound and a weight each, and scored groups as they come. Out: tasks. A pool is picked with a
probability proportional to its weight among those that have tasks; its tasks come in a shuffled order, each once before any comes again.
Picks and orders depend on a seed and on counts alone.

Two pools are always there: `unseen`, of tasks without a score yet, and `failing`, of tasks whose last groups had no reward at all. Without
the second, a task that can only fail would stay unseen for ever, and be drawn more and more as the others leave.

The idea is that of the difficulty pools of prime-rl's orchestrator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.finite import FiniteSampler, ScoredGroup
from jaxrl.tasks.randomness import checked_seed, order_of, pick_weighted
from jaxrl.tasks.saved import checked_count, damaged

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Groups in a row without any reward after which a task is `failing`, until one of its groups has some again."""


class Pool(NamedTuple):
    """One pool."""

    name: str
    """Its name in metrics."""
    max_score: float
    """Largest mean reward of a task's last group that belongs to it, unless an earlier pool takes it."""
    weight: float
    """Its share of the draws, relative to the other pools that have tasks."""


class PoolsSampler(FiniteSampler):
    """Draws tasks by the pool that their last group put them in; implements `TaskSampler`.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      pools: in ascending order of `max_score`, the last of which is infinite; with distinct names, none of them `unseen` or `failing`.
      rng_seed: seed of the draws, `>= 0`.
      unseen_weight: share of the draws for tasks that have no score yet, `> 0`.
      failing_weight: share of the draws for tasks whose last three groups had no reward, `>= 0`.

    Raises:
      ValueError: no task, two with one id, a negative seed, or pools that are not of this kind.

    Example:
      >>> sampler = PoolsSampler(["a", "b"], [Pool("hard", 0.2, 1.0), Pool("easy", math.inf, 0.0)])
      >>> sampler.update("a", [1.0, 1.0])
      >>> sampler.update("b", [0.0, 0.0])
      >>> sampler.sample(3)
      ['b', 'b', 'b']
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        pools: Sequence[Pool],
        rng_seed: int = 0,
        unseen_weight: float = 1.0,
        failing_weight: float = 0.05,
    ) -> None:
        # Both take no task by its score.
        self._pools = [*pools, Pool("unseen", -math.inf, unseen_weight), Pool("failing", -math.inf, failing_weight)]
        _check_pools(self._pools)
        super().__init__(
            tasks,
            "pools",
            pools=[[pool.name, None if math.isinf(pool.max_score) else pool.max_score, pool.weight] for pool in self._pools],
            rng_seed=checked_seed(rng_seed),
        )
        self._unseen, self._failing = len(pools), len(pools) + 1
        self._rng_seed = rng_seed
        self._scores: dict[int, float] = {}
        self._unscored: dict[int, int] = {}
        self._queues: list[list[int]] = [[] for _ in self._pools]
        self._num_rounds = [0] * len(self._pools)
        self._num_draws = 0
        self._said = False
        self._sort()

    def next_index(self) -> int:
        """Return the index of the next task: of the next one in a pool that is picked by weight."""
        p = pick_weighted(self._shares(), self._rng_seed, self._num_draws)
        self._num_draws += 1
        while True:
            queue = self._queues[p]
            while queue:
                index = queue.pop()
                if self._pool_of[index] == p:  # else it has left the pool since the round began
                    return index
            members = sorted(self._members[p])
            order = order_of(len(members), self._rng_seed, p, self._num_rounds[p])
            self._queues[p] = [members[position] for position in order]
            self._num_rounds[p] += 1

    def learn(self, group: ScoredGroup) -> None:
        """Put the task into the pool of its group's mean reward. A group without a reward says nothing of how hard the task is."""
        if group.rewards:
            self._scores[group.index] = math.fsum(group.rewards) / len(group.rewards)
            self._unscored.pop(group.index, None)
        else:
            self._unscored[group.index] = self._unscored.get(group.index, 0) + 1
        p = self._pool_for(group.index)
        self._members[self._pool_of[group.index]].discard(group.index)
        self._members[p].add(group.index)
        self._pool_of[group.index] = p

    def memory(self) -> dict[str, Any]:
        """Return what tasks scored last, and where the round of each pool is."""
        ids = list(self._index)
        names = [pool.name for pool in self._pools]
        return {
            "num_draws": self._num_draws,
            "scores": {ids[index]: score for index, score in self._scores.items()},
            "unscored": {ids[index]: count for index, count in self._unscored.items()},
            "queues": dict(zip(names, map(list, self._queues), strict=True)),
            "num_rounds": dict(zip(names, self._num_rounds, strict=True)),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up what tasks scored last, and where the round of each pool was."""
        names = [pool.name for pool in self._pools]
        for key, wanted in (("scores", self._index), ("unscored", self._index), ("queues", names), ("num_rounds", names)):
            is_partial = wanted is self._index
            found = memory[key]
            if not isinstance(found, Mapping) or not (set(found) <= set(wanted) if is_partial else set(found) == set(wanted)):
                raise damaged(f"{key!r} is {found!r:.80}")
        if any(not _is_finite(score) for score in memory["scores"].values()):
            raise damaged(f"'scores' is {memory['scores']!r:.80}")
        num_draws = checked_count(memory["num_draws"], "'num_draws'")
        unscored = {self._index[name]: checked_count(count, f"'unscored' of {name!r}") for name, count in memory["unscored"].items()}
        num_rounds = [checked_count(memory["num_rounds"][name], f"'num_rounds' of {name!r}") for name in names]
        queues = [memory["queues"][name] for name in names]
        for queue in queues:
            if not isinstance(queue, list) or any(type(at) is not int or not 0 <= at < len(self.tasks) for at in queue):
                raise damaged(f"'queues' holds {queue!r:.80}")
        self._scores = {self._index[name]: score for name, score in memory["scores"].items()}
        self._unscored = unscored
        self._queues, self._num_rounds, self._num_draws = [list(queue) for queue in queues], num_rounds, num_draws
        self._sort()

    def metrics(self) -> dict[str, float]:
        """Return the counters, what follows from them, and for each pool `pool/<name>/{tasks,prob}`."""
        values = super().metrics()
        shares = self._shares()
        for pool, members, share in zip(self._pools, self._members, shares, strict=True):
            values[f"pool/{pool.name}/tasks"] = float(len(members))
            values[f"pool/{pool.name}/prob"] = share / sum(shares)
        return values

    def _sort(self) -> None:
        """Put every task into its pool."""
        self._pool_of = [self._pool_for(index) for index in range(len(self.tasks))]
        self._members: list[set[int]] = [set() for _ in self._pools]
        for index, p in enumerate(self._pool_of):
            self._members[p].add(index)

    def _pool_for(self, index: int) -> int:
        if self._unscored.get(index, 0) >= PATIENCE:
            return self._failing
        score = self._scores.get(index)
        if score is None:
            return self._unseen
        return next(p for p, pool in enumerate(self._pools) if score <= pool.max_score)

    def _shares(self) -> list[float]:
        """Return the weight of each pool: 0 without tasks; where nothing is left that has any, tasks weigh the same."""
        shares = [pool.weight if members else 0.0 for pool, members in zip(self._pools, self._members, strict=True)]
        if any(shares):
            return shares
        if not self._said:
            self._said = True
            logger.warning("all tasks are in pools of weight 0 (%s); they are drawn equally often", self._filled())
        return [float(len(members)) for members in self._members]

    def _filled(self) -> str:
        return ", ".join(f"{len(members)} in {pool.name!r}" for pool, members in zip(self._pools, self._members, strict=True) if members)


def _check_pools(pools: Sequence[Pool]) -> None:
    *own, unseen, _ = pools
    names = [pool.name for pool in pools]
    if not own or len(set(names)) < len(names):
        raise ValueError(f"`pools` needs at least one pool, each with a name of its own, none 'unseen' or 'failing'; got {names[:-2]}")
    bounds = [pool.max_score for pool in own]
    if bounds[-1] != math.inf or any(not low < high for low, high in pairwise(bounds)):
        raise ValueError(f"the `max_score` of `pools` must ascend and the last be infinite, got {bounds}")
    if any(not 0 <= pool.weight < math.inf for pool in pools) or not any(pool.weight for pool in own):
        raise ValueError(f"weights must be finite and >= 0, and one of `pools` above 0, got {[pool.weight for pool in pools]}")
    if not unseen.weight:
        raise ValueError("`unseen_weight`=0 would leave every task unplayed at the start; give it a share")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
