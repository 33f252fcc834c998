"""The training objective: three components, each a sum over its members divided by their count in the whole step.

`total = S_rl / N_rl + S_ce / N_ce + S_ref_kl / N_ref_kl`. In: dense per-token arrays of one micro-batch and the
denominators of the step. Out: that micro-batch's share of the total, so that adding the shares (and their gradients)
over micro-batches and shards gives the objective, however the samples were split. It never computes a denominator from
the micro-batch that it sees.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from jaxrl.config.trainer import LossConfig
from jaxrl.losses.ce import ce_terms
from jaxrl.losses.importance import PolicyTerms
from jaxrl.losses.metrics import MetricSums, finish_metrics
from jaxrl.losses.ref_kl import ref_kl_terms
from jaxrl.losses.rl import RLInputs, rl_terms
from jaxrl.losses.scores import has_context
from jaxrl.types import COMPONENTS, Members, component_members

MEMBER_STREAMS = ("loss_mask", "rl_weights", "ce_weights", "ref_kl_weights", "segment_ids")
"""The arrays that decide membership."""
LOSS_STREAMS = (*MEMBER_STREAMS, "trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
"""The arrays that a loss needs."""
OPTIONAL_ARRAYS = ("trainer_logprobs_raw", "entropy")
"""Temperature-1 logprobs (absent: they equal `trainer_logprobs`), and the entropy that is only measured."""
MAX_METRIC_LOG_RATIO = 20.0
"""Log-ratios are cut here in metrics only, so that one stale token cannot turn a mean into infinity."""


def count_members(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Count the member tokens of each loss component.

    Padding and the first token of every segment are never members: nothing precedes them. Weights decide membership
    (`!= 0`) and never change a count.

    Args:
      arrays: dense [B, T] arrays by name: `loss_mask`, `rl_weights`, `ce_weights`, `ref_kl_weights`, `segment_ids`;
        others are ignored.

    Returns:
      [3] int32: rl, ce, ref_kl.

    Raises:
      ValueError: an array is missing.

    Example:
      >>> ones = jnp.ones((1, 3))
      >>> arrays = {"loss_mask": ones > 0, "rl_weights": ones, "ce_weights": 0 * ones, "ref_kl_weights": 0.5 * ones}
      >>> count_members({**arrays, "segment_ids": jnp.ones((1, 3), jnp.int32)}).tolist()
      [2, 0, 2]
    """
    members, _ = _members(arrays, MEMBER_STREAMS)
    return jnp.stack([jnp.sum(member_BT, dtype=jnp.int32) for member_BT in members])


def compute_loss(arrays: Mapping[str, jax.Array], denominators: jax.Array, config: LossConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the loss of one micro-batch with its metrics as plain scalars.

    Use `loss_and_sums` where a step has more than one micro-batch: a mean in these metrics is over this micro-batch
    only.

    Args:
      arrays: as in `loss_and_sums`.
      denominators: as in `loss_and_sums`.
      config: as in `loss_and_sums`.

    Returns:
      The scalar total and a scalar per metric name.

    Raises:
      ValueError: an array is missing.
    """
    total, sums = loss_and_sums(arrays, denominators, config)
    return total, finish_metrics(sums)


def loss_and_sums(arrays: Mapping[str, jax.Array], denominators: jax.Array, config: LossConfig) -> tuple[jax.Array, MetricSums]:
    """Compute this micro-batch's share of the step's loss, with metrics that add up over micro-batches.

    A masked or dropped token never reaches the value or the gradient, whatever its arrays hold (NaN and infinity
    included). Without any member the total is exactly 0.0, and so is its gradient.

    Args:
      arrays: dense [B, T] arrays by name. float32: `trainer_logprobs` (sampling temperature), `trainer_logprobs_raw`
        (temperature 1; absent means the former), `inference_logprobs`, `ref_logprobs`, `advantages`, `rl_weights`,
        `ce_weights`, `ref_kl_weights`, and `entropy` (optional, for its metric only). bool: `loss_mask`. int32:
        `segment_ids`, 0 is padding.
      denominators: [3] member tokens of rl, ce and ref_kl over all micro-batches and shards of the step; values below 1
        count as 1.
      config: the rl loss; ce and ref_kl have no settings.

    Returns:
      The scalar total, differentiable in the trainer's logprobs, and `MetricSums`. `loss/<component>` is already
      divided by its denominator, so shares add up. `mismatch/*` is over rl and ref_kl members only: a ce token has no
      sampling logprob.

    Raises:
      ValueError: an array is missing.
    """
    members, context_BT = _members(arrays, LOSS_STREAMS)
    chex.assert_shape(denominators, (len(COMPONENTS),))
    floats = [arrays[name] for name in (*LOSS_STREAMS, *OPTIONAL_ARRAYS) if name in arrays and name not in ("loss_mask", "segment_ids")]
    chex.assert_type(floats, float)
    streams = _Streams(arrays, members, context_BT)
    rl_inputs = RLInputs(
        trainer_logprobs_BT=streams.read("trainer_logprobs", members.rl),
        inference_logprobs_BT=streams.read("inference_logprobs", members.rl),
        advantages_BT=streams.read("advantages", members.rl),
        weights_BT=streams.read("rl_weights", members.rl),
        members_BT=members.rl,
        segment_ids_BT=jnp.asarray(arrays["segment_ids"]),
    )
    rl = rl_terms(rl_inputs, config)
    ce_BT = ce_terms(streams.read_raw(members.ce), streams.read("ce_weights", members.ce))
    ref_kl = ref_kl_terms(
        streams.read("trainer_logprobs", members.ref_kl),
        streams.read_raw(members.ref_kl),
        streams.read("inference_logprobs", members.ref_kl),
        streams.read("ref_logprobs", members.ref_kl),
        streams.read("ref_kl_weights", members.ref_kl),
        members.ref_kl,
    )
    shares = _sums([rl.terms_BT, ce_BT, ref_kl.terms_BT]) / jnp.maximum(jnp.asarray(denominators, streams.dtype), 1)
    total = jnp.sum(shares)
    counts = _sums(list(members)).astype(streams.dtype)
    totals = {"loss/total": total}
    totals |= {f"loss/{name}": share for name, share in zip(COMPONENTS, shares, strict=True)}
    totals |= {f"tokens/{name}": count for name, count in zip(COMPONENTS, counts, strict=True)}
    means, maxima = _measure(streams, rl, ref_kl)
    return total, jax.lax.stop_gradient(MetricSums(totals=totals, means=means, maxima=maxima))


class _Streams:
    """The arrays of a micro-batch, readable only through a mask: 0.0 without gradient everywhere else."""

    def __init__(self, arrays: Mapping[str, jax.Array], members: Members, context_BT: jax.Array) -> None:
        self.arrays = arrays
        self.members = members
        self.sampled_BT = context_BT & jnp.asarray(arrays["loss_mask"], bool)
        """[B, T] bool, tokens that the policy sampled and that have context."""
        self.dtype = jnp.result_type(arrays["trainer_logprobs"], jnp.float32)
        """float32, or better if the logprobs are."""

    def read(self, name: str, where_BT: jax.Array) -> jax.Array:
        """[B, T], one array where the mask is True."""
        return jnp.where(where_BT, self.arrays[name], 0).astype(self.dtype)

    def read_raw(self, where_BT: jax.Array) -> jax.Array:
        """[B, T], temperature-1 logprobs of the trainer where the mask is True."""
        return self.read("trainer_logprobs_raw" if "trainer_logprobs_raw" in self.arrays else "trainer_logprobs", where_BT)


def _measure(
    streams: _Streams, rl: PolicyTerms, ref_kl: PolicyTerms
) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
    """Sum up what people want to see of a micro-batch: `(numerator, count)` per mean, and maxima."""
    members, dropped_BT = streams.members, rl.dropped_high_BT | rl.dropped_low_BT
    compared_BT = members.rl | members.ref_kl
    log_ratio_BT = streams.read("trainer_logprobs", compared_BT) - streams.read("inference_logprobs", compared_BT)
    capped_BT = jnp.minimum(log_ratio_BT, MAX_METRIC_LOG_RATIO)
    # r - 1 - d by `expm1`: at the tiny log-ratios of equal weights the plain form is rounding noise, of either sign.
    kl_BT = jnp.maximum(jnp.expm1(capped_BT) - log_ratio_BT, 0)
    raw_logprobs_BT = streams.read_raw(members.ce | members.ref_kl)
    measured = {
        "mismatch/kl/mean": (kl_BT, compared_BT),
        "mismatch/kl/kept/mean": (kl_BT, members.rl & ~dropped_BT),
        "mismatch/kl/dropped/mean": (kl_BT, dropped_BT),
        "trust_region/rl/dropped_frac": (dropped_BT, members.rl),
        "trust_region/rl/dropped_high_frac": (rl.dropped_high_BT, members.rl),
        "trust_region/rl/dropped_low_frac": (rl.dropped_low_BT, members.rl),
        "trust_region/ref_kl/dropped_frac": (ref_kl.dropped_low_BT, members.ref_kl),
        "ce/nll/mean": (-raw_logprobs_BT, members.ce),
        "ref_kl/log_ratio/mean": (streams.read("ref_logprobs", members.ref_kl) - raw_logprobs_BT, members.ref_kl),
    }
    if "entropy" in streams.arrays:
        measured["entropy/mean"] = (streams.read("entropy", streams.sampled_BT), streams.sampled_BT)
    values = [jnp.where(counted_BT, value_BT, 0).astype(streams.dtype) for value_BT, counted_BT in measured.values()]
    numerators, counts = jnp.split(_sums(values + [counted_BT.astype(streams.dtype) for _, counted_BT in measured.values()]), 2)
    means = {name: (numerators[i], counts[i]) for i, name in enumerate(measured)}
    return means, {"mismatch/ratio/max": jnp.max(jnp.where(compared_BT, jnp.exp(capped_BT), 0), initial=0)}


def _members(arrays: Mapping[str, jax.Array], needed: tuple[str, ...]) -> tuple[Members, jax.Array]:
    """Check the arrays; return the members of each component and the tokens that have context."""
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(f"the loss needs the arrays {needed!r}; missing: {missing!r}")
    present = [arrays[name] for name in (*needed, *OPTIONAL_ARRAYS) if name in arrays]
    chex.assert_rank(present, 2)
    chex.assert_equal_shape(present)
    chex.assert_type(arrays["segment_ids"], int)
    loss_mask_BT, rl_BT, ce_BT, ref_kl_BT, segment_ids_BT = (jnp.asarray(arrays[name]) for name in MEMBER_STREAMS)
    context_BT = has_context(segment_ids_BT)
    return component_members(loss_mask_BT.astype(bool), rl_BT, ce_BT, ref_kl_BT, context_BT), context_BT


def _sums(terms: list[jax.Array]) -> jax.Array:
    """Sum each [B, T] array; stacked, so that sharded rows cost one all-reduce and not one per array."""
    return jnp.sum(jnp.stack(terms), axis=(1, 2))
