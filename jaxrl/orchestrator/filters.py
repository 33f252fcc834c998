"""Which rollouts are not worth training on: pure predicates, and one function that applies a list of them.

In: rollouts whose streams are stamped. Out: those that stay and those that go, with the filter's name, and how many
each filter matched. A filter that looks at advantages only never matches a rollout that another loss component trains
on; one that judges quality may. Replacing what was dropped is the batcher's caller's work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.config.filters import (
    FilterBase,
    GibberishFilterConfig,
    MinRewardFilterConfig,
    OverlongFilterConfig,
    RepetitionFilterConfig,
)
from jaxrl.types import OPTIONAL_STREAMS, Node, Rollout

_FLOAT_STREAMS = ("inference_logprobs", "temperatures", *OPTIONAL_STREAMS)


def is_gibberish(rollout: Rollout, config: GibberishFilterConfig, vocab_size: int) -> bool:
    """Say whether the policy sampled a rare token that it found less likely than one picked at random.

    A token counts if its id is above `token_id_threshold` and its logprob below -ln(vocab_size) - `logprob_offset`, both
    strictly. Tokens that the policy did not sample have no logprob of it and never count.

    Reference: https://arxiv.org/abs/2510.02387, section 5.2.
    """
    # In float32, like the logprobs: a token at the threshold does not match, however the threshold is rounded.
    ceiling = np.float32(-math.log(vocab_size) - config.logprob_offset)
    for node in rollout.nodes:
        logprobs = _policy_logprobs(node)
        if logprobs is not None and logprobs.min() < ceiling:
            is_rare = node.token_ids[-node.num_sampled :] > config.token_id_threshold
            if (is_rare & (logprobs < ceiling)).any():
                return True
    return False


def is_repetitive(rollout: Rollout, config: RepetitionFilterConfig, vocab_size: int) -> bool:
    """Say whether the policy was sure of `window` sampled tokens in a row, in any branch.

    A token is sure if its probability is above `prob_threshold`, strictly. What the policy did not sample stands between
    its replies and is passed over; a token that it was not sure of ends the streak, and so does the end of a branch.

    Reference: https://arxiv.org/abs/2506.13585, section 3.2.
    """
    if rollout.num_completion_tokens < config.window:
        return False
    threshold = np.float32(math.log(config.prob_threshold))
    sure = {i: p > threshold for i, node in enumerate(rollout.nodes) if (p := _policy_logprobs(node)) is not None}
    return any(_longest_streak([sure[i] for i in rollout.path_to(leaf) if i in sure]) >= config.window for leaf in rollout.leaves)


def is_zero_advantage(rollout: Rollout, config: FilterBase | None = None, vocab_size: int = 0) -> bool:
    """Say whether a rollout's credit is assigned, exactly 0 everywhere, and all that it would be trained for.

    Never assigned is not zero; and a rollout with a non-zero ce or ref_kl weight still has something to teach.
    """
    for sample in rollout.samples:
        if sample.advantages is None or sample.advantages.any():
            return False
        if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.ref_kl_weights)):
            return False
    return True


def is_overlong(rollout: Rollout, config: OverlongFilterConfig, vocab_size: int) -> bool:
    """Say whether a limit cut the rollout, or it has more than `max_completion_tokens` sampled tokens."""
    limit = config.max_completion_tokens
    return rollout.is_truncated or (limit is not None and rollout.num_completion_tokens > limit)


def is_non_finite(rollout: Rollout, config: FilterBase | None = None, vocab_size: int = 0) -> bool:
    """Say whether the reward, a metric, or any value of a sample's streams is not finite."""
    numbers = [*([] if rollout.reward is None else [rollout.reward]), *rollout.metrics.values()]
    if not np.isfinite(np.asarray(numbers, np.float64)).all():
        return True
    streams = (getattr(sample, name) for sample in rollout.samples for name in _FLOAT_STREAMS)
    return not all(stream is None or np.isfinite(stream).all() for stream in streams)


def is_below_min_reward(rollout: Rollout, config: MinRewardFilterConfig, vocab_size: int) -> bool:
    """Say whether the reward is below `threshold`; a rollout without one has none to be below it."""
    return rollout.reward is not None and rollout.reward < config.threshold


Predicate = Callable[[Rollout, Any, int], bool]
"""(rollout, the filter's config, vocabulary size of the policy's tokenizer) -> whether it matches."""

PREDICATES: dict[str, Predicate] = {
    "gibberish": is_gibberish,
    "repetition": is_repetitive,
    "zero_advantage": is_zero_advantage,
    "overlong": is_overlong,
    "non_finite": is_non_finite,
    "min_reward": is_below_min_reward,
}
"""Predicate by the `type` of a filter's config."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter, ready to be asked."""

    config: FilterBase
    vocab_sizes: Mapping[str, int]
    """Ids that the tokenizer knows, by environment."""

    @property
    def name(self) -> str:
        """What it is called in the ledger and in metrics."""
        return self.config.type

    def matches(self, rollout: Rollout) -> bool:
        """Say whether it matches a rollout."""
        return PREDICATES[self.name](rollout, self.config, self.vocab_sizes[rollout.env_name])


def build_filters(configs: Iterable[FilterBase], vocab_sizes: Mapping[str, int]) -> tuple[Filter, ...]:
    """Return the filters of one slot, in order.

    Args:
      configs: the slot.
      vocab_sizes: number of ids that the tokenizer of each environment knows.
    """
    return tuple(Filter(config, vocab_sizes) for config in configs)


@dataclass(slots=True)
class Filtered:
    """What a list of filters made of some rollouts."""

    kept: list[Rollout] = field(default_factory=list)
    dropped: list[tuple[Rollout, str]] = field(default_factory=list)
    """Each with the name of the filter that dropped it."""
    matched: Counter[str] = field(default_factory=Counter)
    """Rollouts that each filter matched, whether it dropped them or not; 0 for one that matched none."""


def apply_filters(rollouts: Iterable[Rollout], filters: Sequence[Filter]) -> Filtered:
    """Put each rollout through every filter; each counts what it matches, and the first enforced match drops the rollout.

    Args:
      rollouts: scored rollouts with stamped samples.
      filters: in order.

    Returns:
      Every rollout once, in `kept` or in `dropped`, in the order given.
    """
    result = Filtered(matched=Counter({own.name: 0 for own in filters}))
    for rollout in rollouts:
        matching = [own for own in filters if own.matches(rollout)]
        result.matched.update(own.name for own in matching)
        dropping = next((own.name for own in matching if own.config.enforce), None)
        if dropping is None:
            result.kept.append(rollout)
        else:
            result.dropped.append((rollout, dropping))
    return result


def _policy_logprobs(node: Node) -> np.ndarray | None:
    """Return the [num_sampled] logprobs of a node that the policy sampled; None for any other, demonstrations included."""
    return node.logprobs if node.num_sampled and node.versions is not None else None


def _longest_streak(parts: Sequence[np.ndarray]) -> int:
    """Return the longest run of True in bool arrays laid end to end."""
    if not parts:
        return 0
    ends = np.flatnonzero(~np.concatenate([*parts, np.zeros(1, bool)]))
    return int(np.diff(ends, prepend=-1).max()) - 1
