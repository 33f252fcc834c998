"""Which rollouts are not worth a place in a batch: one class per filter, told apart by `type`.

A filter stands in one of two slots of `orchestrator`, before or after a batch is formed, and is enforced or only
counted. What it matches is computed in `orchestrator.filters`; the defaults here are the recommended settings.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxrl.config.base import Section


class FilterBase(Section):
    """What every filter has."""

    type: str
    """Tag of the filter; each filter fixes its own."""
    enforce: bool = True
    """True drops what matches; False only counts it."""


class GibberishFilterConfig(FilterBase):
    """Matches a rollout with a rare token that the policy itself found less likely than a token picked at random.

    Reference: https://arxiv.org/abs/2510.02387, section 5.2.
    """

    type: Literal["gibberish"] = "gibberish"
    """Which filter: `gibberish`."""
    enforce: bool = False
    """True drops what matches; False only counts it."""
    token_id_threshold: int = Field(default=100_000, ge=-1)
    """Only tokens with a higher id are looked at: byte-pair vocabularies list rare tokens last. -1 looks at all."""
    logprob_offset: float = 2.0
    """A token matches when its logprob is below that of a token picked at random, -ln(vocabulary size), by more than this, in
    nats."""


class RepetitionFilterConfig(FilterBase):
    """Matches a rollout in which the policy was sure of every token for a long stretch, as it is inside a loop.

    Reference: https://arxiv.org/abs/2506.13585, section 3.2.
    """

    type: Literal["repetition"] = "repetition"
    """Which filter: `repetition`."""
    enforce: bool = False
    """True drops what matches; False only counts it."""
    window: int = Field(default=3000, ge=1)
    """Sampled tokens in a row that must be sure; the tokens between two replies are passed over."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """A token is sure when it was sampled with a higher probability than this."""


class ZeroAdvantageFilterConfig(FilterBase):
    """Matches a rollout whose assigned advantages are all exactly 0 and that has no ce or ref_kl weight."""

    type: Literal["zero_advantage"] = "zero_advantage"
    """Which filter: `zero_advantage`."""


class OverlongFilterConfig(FilterBase):
    """Matches a rollout that a token or turn limit cut, or that is longer than wanted."""

    type: Literal["overlong"] = "overlong"
    """Which filter: `overlong`."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """A rollout of more sampled tokens than this matches too, cut or not; null matches only what was cut."""


class NonFiniteFilterConfig(FilterBase):
    """Matches a rollout with a number that is not finite: its reward, a metric, or a value in a stream of a sample."""

    type: Literal["non_finite"] = "non_finite"
    """Which filter: `non_finite`."""


class MinRewardFilterConfig(FilterBase):
    """Matches a rollout whose reward is too low, such as a wrong answer of the model that is imitated."""

    type: Literal["min_reward"] = "min_reward"
    """Which filter: `min_reward`."""
    threshold: float
    """A reward below this matches; one that equals it does not."""


FilterConfig = Annotated[
    GibberishFilterConfig
    | RepetitionFilterConfig
    | ZeroAdvantageFilterConfig
    | OverlongFilterConfig
    | NonFiniteFilterConfig
    | MinRewardFilterConfig,
    Field(discriminator="type"),
]
