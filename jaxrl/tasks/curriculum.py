"""More of the tasks whose groups are likely to carry a signal: keys by signal, tasks of a key in turn.

In: a task list, what its tasks are told apart by, and scored groups as they come. Out: tasks. A key is picked with a probability
proportional to its signal (`tasks.signal`) plus a floor, however many tasks it has; the tasks of a key come in a shuffled order, each once
before any comes again. Picks and orders depend on a seed and on counts alone. Costs are counted and never weigh a key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.finite import FiniteSampler, ScoredGroup
from jaxrl.tasks.identity import fingerprint
from jaxrl.tasks.keys import KeyFunction, KeyName, keys_of
from jaxrl.tasks.randomness import checked_seed, order_of, pick_weighted
from jaxrl.tasks.saved import checked_count, checked_number, damaged
from jaxrl.tasks.signal import signal_of, success_rate, varied_share

logger = logging.getLogger(__name__)

MAX_KEYS_IN_METRICS = 32
"""Keys with metrics of their own: the first ones of the task list, so that a curve has no gaps; the others share one set."""
PATIENCE = 3
"""Groups in a row without a reward from which on a task that is a key of its own is drawn less."""
MAX_HALVINGS = 10
"""How often its signal is halved at most; with `eps` 0 it would else be given up."""
UNSCORED_IN_A_ROW = 10
"""After so many groups in a row without a reward, a key is worth a warning."""


@dataclass(slots=True)
class KeyStats:
    """What is remembered of one key."""

    drawn: int = 0
    """Draws of its tasks."""
    successes: float = 0.0
    """Decayed number of rollouts with a reward of at least the threshold."""
    failures: float = 0.0
    """Decayed number of rollouts with a lower reward."""
    varied: float = 0.0
    """Decayed number of groups whose rewards differed by more than the tolerance."""
    groups: float = 0.0
    """Decayed number of groups that could: those with two rewards or more."""
    unscored: int = 0
    """Groups without any reward since the last one that had some."""
    episodes: int = 0
    """Rollouts of its groups, scored or not."""
    cost: float | None = None
    """What they cost; None until costs are reported."""

    def add(self, rewards: Sequence[float], *, gamma: float, success_threshold: float, tolerance: float) -> None:
        """Learn from the rewards of one group. A group without any changes no rate; one that lacks some decays as a whole one does."""
        if not rewards:
            self.unscored += 1
            return
        self.unscored = 0
        successes = sum(reward >= success_threshold for reward in rewards)
        self.successes = gamma * self.successes + successes
        self.failures = gamma * self.failures + len(rewards) - successes
        if len(rewards) >= 2:
            self.varied = gamma * self.varied + (max(rewards) - min(rewards) > tolerance)
            self.groups = gamma * self.groups + 1

    @classmethod
    def from_state(cls, key: str, state: Any) -> KeyStats:
        """Return what a saved state remembers of a key; raises ValueError if it is damaged."""
        if not isinstance(state, Mapping) or set(state) != set(_REMEMBERED):
            raise damaged(f"key {key!r} holds {state!r:.80}")
        for name, value in state.items():
            what = f"{name!r} of key {key!r}"
            if name in ("drawn", "unscored", "episodes"):
                checked_count(value, what)
            elif name != "cost" or value is not None:
                checked_number(value, what)
        return cls(**state)


_REMEMBERED = tuple(field.name for field in fields(KeyStats))


class CurriculumSampler(FiniteSampler):
    """Draws tasks by how likely their kind is to carry a signal; implements `TaskSampler`.

    Args:
      tasks: at least one, with distinct ids; handed out as they are, never changed.
      group_size: rollouts of one task, `>= 1`. In a group of one no signal can be: keys are then drawn evenly.
      key: which tasks are of one kind, those that share their `difficulty`, `group` or `id`, or what a function makes of a task; see
        `tasks.keys`.
      rng_seed: seed of the draws, `>= 0`.
      gamma: what an earlier group still counts after each later one of its key, in (0, 1].
      eps: floor that is added to each signal, `>= 0`.
      success_threshold: a rollout with at least this reward is a success.
      signal: `beta`, by the rate of successes; `variance`, the share of groups whose rewards differed, for graded rewards.
      signal_tolerance: rewards of a group that differ by no more than this are equal, for `variance`.

    Raises:
      ValueError: an argument is out of its range, the tasks have no such key, or no key would have any weight.

    Example:
      >>> sampler = CurriculumSampler([{"id": f"t{d}", "difficulty": d} for d in range(2)], group_size=8)
      >>> sampler.update({"id": "t0"}, [1.0] * 8)
      >>> round(sampler.metrics()["key/0/prob"], 3), round(sampler.metrics()["key/1/prob"], 3)
      (0.373, 0.627)
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        group_size: int,
        key: KeyName | KeyFunction = "difficulty",
        rng_seed: int = 0,
        gamma: float = 0.9,
        eps: float = 0.05,
        success_threshold: float = 1.0,
        signal: Literal["beta", "variance"] = "beta",
        signal_tolerance: float = 0.0,
    ) -> None:
        _check_numbers(group_size, gamma, eps, success_threshold)
        # The state holds them, and JSON knows no other floats.
        gamma, eps, success_threshold, signal_tolerance = map(float, (gamma, eps, success_threshold, signal_tolerance))
        if signal not in ("beta", "variance"):
            raise ValueError(f"`signal` must be 'beta' or 'variance', got {signal!r}")
        if not 0 <= signal_tolerance < math.inf or (signal_tolerance and signal != "variance"):
            raise ValueError(
                f"`signal_tolerance` must be >= 0, and is for `signal`='variance' alone; got {signal_tolerance!r} for {signal!r}"
            )
        tasks = list(tasks)
        self._key_name, keys = keys_of(tasks, key)
        super().__init__(
            tasks,
            "curriculum",
            key=self._key_name,
            keys=fingerprint(keys),
            group_size=group_size,
            rng_seed=checked_seed(rng_seed),
            gamma=gamma,
            eps=eps,
            success_threshold=success_threshold,
            signal=signal,
            signal_tolerance=signal_tolerance,
        )
        self._group_size, self._rng_seed, self._signal, self._eps = group_size, rng_seed, signal, eps
        self._learning = {"gamma": gamma, "success_threshold": success_threshold, "tolerance": signal_tolerance}
        self._keys = list(dict.fromkeys(keys))
        if len(self._keys) == 1 and len(tasks) > 1:
            logger.warning(
                "all %d tasks are of one kind, %s %r, so this curriculum has no choice and draws them evenly: give the tasks "
                "several difficulties (for `reasoning_gym`, `tiers`), or set `tasks.key` = \"id\", which makes each task a kind of its own",
                len(tasks), self._key_name, self._keys[0],
            )  # fmt: skip
        number = {name: index for index, name in enumerate(self._keys)}
        self._key_of = [number[name] for name in keys]
        self._members: list[list[int]] = [[] for _ in self._keys]
        for index, k in enumerate(self._key_of):
            self._members[k].append(index)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._take({})

    def next_index(self) -> int:
        """Return the index of the next task: of the next one of a key that is picked by weight."""
        k = pick_weighted(self._weights, self._rng_seed, self._num_draws)
        members, stats = self._members[k], self._stats.setdefault(k, KeyStats())
        num_rounds, position = divmod(stats.drawn, len(members))
        if k not in self._orders or self._orders[k][0] != num_rounds:
            self._orders[k] = (num_rounds, order_of(len(members), self._rng_seed, k, num_rounds))
        stats.drawn += 1
        self._num_draws += 1
        return members[self._orders[k][1][position]]

    def learn(self, group: ScoredGroup) -> None:
        """Move the rates of one key, and with them its weight; every other key's stays."""
        k = self._key_of[group.index]
        stats = self._stats.setdefault(k, KeyStats())
        stats.add(group.rewards, **self._learning)
        stats.episodes += group.num_rollouts
        if group.cost is not None:
            stats.cost = (stats.cost or 0.0) + group.cost
        self._weigh(k)
        if stats.unscored == UNSCORED_IN_A_ROW and self._key_name != "id":
            logger.warning(
                "none of the last %d groups of %s %r had a reward; it goes on being drawn with a probability of %.3f",
                UNSCORED_IN_A_ROW, self._key_name, self._keys[k], self._weights[k] / self._weights.sum(),
            )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Return what is known of each key that was drawn or heard of."""
        return {"stats": {self._keys[k]: {name: getattr(stats, name) for name in _REMEMBERED} for k, stats in self._stats.items()}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up what is known of each key."""
        saved = memory["stats"]
        if not isinstance(saved, Mapping) or not set(saved) <= set(self._keys):
            raise damaged(f"'stats' is {saved!r:.80}, expected a dict by key")
        self._take({k: KeyStats.from_state(key, saved[key]) for k, key in enumerate(self._keys) if key in saved})

    def metrics(self) -> dict[str, float]:
        """Return the counters, what follows from them, and for each key `key/<key>/{p_hat,signal,prob,episodes,cost}`.

        Of more than 32 keys the first 32 of the task list have metrics of their own, and the rest together `others/...`: means of
        `p_hat` and `signal`, sums of the others. `cost` is absent where no cost was reported.
        """
        values = super().metrics()
        probs = self._weights / self._weights.sum()
        own = range(min(len(self._keys), MAX_KEYS_IN_METRICS))
        stats = [self._stats.get(k, KeyStats()) for k in own]
        for k in own:
            values |= _named(f"key/{self._keys[k]}", self._rates[k], self._signals[k], probs[k], stats[k].episodes, stats[k].cost)
        if len(self._keys) > len(own):
            rest = slice(len(own), None)
            episodes = self._counters.episodes - sum(each.episodes for each in stats)
            cost = None
            if self._counters.cost is not None and episodes:
                cost = self._counters.cost - math.fsum(each.cost or 0.0 for each in stats)
            values |= _named("others", self._rates[rest].mean(), self._signals[rest].mean(), probs[rest].sum(), episodes, cost)
        return values

    def _take(self, stats: dict[int, KeyStats]) -> None:
        """Take up what is known of some keys; of the others nothing is."""
        self._stats = stats
        self._rates, self._signals, self._weights = (np.full(len(self._keys), value) for value in self._worth(KeyStats()))
        self._num_draws = sum(each.drawn for each in stats.values())
        for k in stats:
            self._weigh(k)

    def _weigh(self, k: int) -> None:
        self._rates[k], self._signals[k], self._weights[k] = self._worth(self._stats[k])

    def _worth(self, stats: KeyStats) -> tuple[float, float, float]:
        """Return the success rate, signal and weight of a key."""
        rate = success_rate(stats.successes, stats.failures)
        is_beta = self._signal == "beta" or self._group_size == 1
        signal = signal_of(rate, self._group_size) if is_beta else varied_share(stats.varied, stats.groups)
        # A single task that never gets a reward would else keep the large weight of what is not known yet.
        halvings = max(stats.unscored - PATIENCE + 1, 0) if self._key_name == "id" else 0
        return rate, signal, signal * 0.5 ** min(halvings, MAX_HALVINGS) + self._eps


def _named(prefix: str, p_hat: float, signal: float, prob: float, episodes: int, cost: float | None) -> dict[str, float]:
    """Return the metrics of one key, or of several together."""
    values = {"p_hat": p_hat, "signal": signal, "prob": prob, "episodes": episodes, "cost": cost}
    return {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}


def _check_numbers(group_size: int, gamma: float, eps: float, success_threshold: float) -> None:
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"`group_size` must be an integer >= 1, got {group_size!r}")
    if not 0 < gamma <= 1:
        raise ValueError(f"`gamma` must be above 0 and at most 1, got {gamma!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"`eps` must be >= 0, got {eps!r}")
    if not math.isfinite(success_threshold):
        raise ValueError(f"`success_threshold` must be finite, got {success_threshold!r}")
    if group_size == 1 and not eps:
        raise ValueError("a group of one never carries a signal, so with `eps`=0 no key has any weight; set `eps`, or a larger group")
    if group_size == 1:
        logger.warning("a group of one never carries a signal: the curriculum draws every key equally often")
