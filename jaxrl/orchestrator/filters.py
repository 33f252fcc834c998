"""Which rollouts are not worth training on: pure predicates, and one function that applies a list of them.

In: rollouts whose streams are stamped. Out: those that stay and those that go, with the filter's name. A filter that
looks at advantages only never matches a rollout that another loss component trains on. Replacing what was dropped is
the batcher's caller's work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxrl.config.orchestrator import FilterConfig
from jaxrl.types import Rollout


def is_zero_advantage(rollout: Rollout) -> bool:
    """Say whether a rollout's credit is assigned, exactly 0 everywhere, and all that it would be trained for.

    Never assigned is not zero; and a rollout with a non-zero ce or ref_kl weight still has something to teach.
    """
    for sample in rollout.samples:
        if sample.advantages is None or sample.advantages.any():
            return False
        if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.ref_kl_weights)):
            return False
    return True


PREDICATES: dict[str, Callable[[Rollout], bool]] = {"zero_advantage": is_zero_advantage}
"""Predicate by the `type` of a filter's config."""


@dataclass(slots=True)
class Filtered:
    """What a list of filters made of some rollouts."""

    kept: list[Rollout] = field(default_factory=list)
    dropped: list[tuple[Rollout, str]] = field(default_factory=list)
    """Each with the name of the filter that dropped it."""
    matched: Counter[str] = field(default_factory=Counter)
    """Rollouts that a filter was the first to match, dropped or only counted."""


def apply_filters(rollouts: Iterable[Rollout], configs: Sequence[FilterConfig]) -> Filtered:
    """Put each rollout through the filters; the first that matches counts it, and drops it if it is enforced.

    Args:
      rollouts: scored rollouts with stamped samples.
      configs: filters, in order.

    Returns:
      Every rollout once, in `kept` or in `dropped`, in the order given.
    """
    result = Filtered()
    for rollout in rollouts:
        match = next((config for config in configs if PREDICATES[config.type](rollout)), None)
        if match is not None:
            result.matched[match.type] += 1
        if match is not None and match.enforce:
            result.dropped.append((rollout, match.type))
        else:
            result.kept.append(rollout)
    return result
