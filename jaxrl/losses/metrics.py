"""Metrics as numbers that may be added up over micro-batches and shards and divided once, at the end of a step.

A mean of per-micro-batch means weighs a short micro-batch like a long one; a `(numerator, count)` pair does not. In:
sums of one micro-batch. Out: `merge_metrics` of two, `finish_metrics` to plain scalars. It does not decide what is
measured: each loss does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

_COUNTS = {"ce/nll/mean": "tokens/ce", "ref_kl/log_ratio/mean": "tokens/ref_kl"}
"""What a mean is over, for the metrics that are of no use without."""


class MetricSums(NamedTuple):
    """Metrics of a part of a step, by name; a pytree of scalars. One program always has the same names."""

    totals: Mapping[str, jax.Array]
    """Scalars that add up: `loss/*` (already divided by the step's denominators) and `tokens/*`."""
    means: Mapping[str, tuple[jax.Array, jax.Array]]
    """`(numerator, count)`, both of which add up; the metric is their quotient, 0.0 if the count is 0."""
    maxima: Mapping[str, jax.Array]
    """Scalars of which the largest counts; 0.0, their identity, if nothing was measured (all are >= 0)."""


def merge_metrics(left: MetricSums, right: MetricSums) -> MetricSums:
    """Combine the metrics of two parts of a step; associative, and all-zeros is neutral.

    Args:
      left: metrics of one part.
      right: metrics of another part, with the same names.

    Returns:
      The metrics of both parts together.
    """
    return MetricSums(
        totals=jax.tree.map(jnp.add, left.totals, right.totals),
        means=jax.tree.map(jnp.add, left.means, right.means),
        maxima=jax.tree.map(jnp.maximum, left.maxima, right.maxima),
    )


def finish_metrics(sums: MetricSums) -> dict[str, jax.Array]:
    """Divide once: turn the metrics of a whole step into one scalar per name.

    Args:
      sums: metrics of every part of the step, merged.

    Returns:
      Scalar by metric name; a mean over nothing is 0.0.

    Example:
      >>> part = MetricSums({"tokens/rl": 4.0}, {"entropy/mean": (2.0, 4.0)}, {"mismatch/ratio/max": 1.5})
      >>> {name: float(value) for name, value in finish_metrics(part).items()}
      {'tokens/rl': 4.0, 'entropy/mean': 0.5, 'mismatch/ratio/max': 1.5}
    """
    means = {name: numerator / jnp.maximum(count, 1) for name, (numerator, count) in sums.means.items()}
    return {**sums.totals, **means, **sums.maxima}


def measured(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the means over the tokens of a component that has none in the step: 0.0 would look like a perfect fit.

    Example:
      >>> measured({"tokens/ce": 0.0, "ce/nll/mean": 0.0, "tokens/ref_kl": 2.0, "ref_kl/log_ratio/mean": 0.0})
      {'tokens/ce': 0.0, 'tokens/ref_kl': 2.0, 'ref_kl/log_ratio/mean': 0.0}
    """
    return {name: value for name, value in metrics.items() if metrics.get(_COUNTS.get(name, ""), 1) > 0}
