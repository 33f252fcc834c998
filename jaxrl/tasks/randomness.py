"""Draws that depend on a seed and a count alone, so that the count is the whole state of a generator.

In: a seed, the name of a stream, counts. Out: one pick by weight, or one order. What is picked is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PICKS, ORDERS = 0, 1
"""The streams of a sampler: which key or pool is next, and in which order the tasks of one come."""


def checked_seed(rng_seed: int) -> int:
    """Return a seed; raises ValueError unless it is an integer >= 0."""
    if isinstance(rng_seed, bool) or not isinstance(rng_seed, int | np.integer) or rng_seed < 0:
        raise ValueError(f"`rng_seed` must be an integer >= 0, got {rng_seed!r}")
    return int(rng_seed)


def pick_weighted(weights: Sequence[float] | np.ndarray, rng_seed: int, num_picks: int) -> int:
    """Return pick number `num_picks`: an index into `weights`, with probability proportional to its weight.

    Args:
      weights: finite, >= 0, and not all 0.
      rng_seed: seed of the sampler.
      num_picks: picks before this one.

    Example:
      >>> picks = [pick_weighted([3.0, 0.0, 1.0], rng_seed=0, num_picks=n) for n in range(400)]
      >>> set(picks), 0.7 < picks.count(0) / 400 < 0.8
      ({0, 2}, True)
    """
    return share_at(weights, _generator(rng_seed, PICKS, num_picks).random())


def share_at(weights: Sequence[float] | np.ndarray, point_frac: float) -> int:
    """Return which of several shares, laid end to end, a point falls into.

    Args:
      weights: the sizes of the shares, finite, >= 0, and not all 0.
      point_frac: how far along all of them the point is, in [0, 1).

    Example:
      >>> [share_at([3.0, 0.0, 1.0], point_frac) for point_frac in (0.0, 0.74, 0.75)]
      [0, 0, 2]
    """
    bounds = np.cumsum(np.asarray(weights, np.float64))
    # Rounding may put the point on the last bound, and what comes after that has no weight.
    return min(int(np.searchsorted(bounds, point_frac * bounds[-1], side="right")), int(np.searchsorted(bounds, bounds[-1])))


def order_of(size: int, rng_seed: int, which: int, num_rounds: int) -> np.ndarray:
    """Return a permutation [size] int64: the order of one of several lists in its round `num_rounds`.

    Example:
      >>> sorted(order_of(4, rng_seed=0, which=2, num_rounds=7).tolist())
      [0, 1, 2, 3]
    """
    return _generator(rng_seed, ORDERS, which, num_rounds).permutation(size)


def _generator(rng_seed: int, *path: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(rng_seed, spawn_key=path))
