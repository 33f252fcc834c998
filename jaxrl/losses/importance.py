"""The importance ratio of the trainer's to the sampling policy, and the policy term that rl and ref_kl share.

In: logprobs under both policies and the tokens that matter. Out: log-ratios, probability gaps and per-token terms that
stay finite, in value and gradient, whatever a masked or dropped token holds. It does not decide which tokens are
dropped: each loss does.

Non-finite safety is a double `where`: the exponent is replaced before `exp` and the result after it. Multiplying by a
mask would give `0 * inf = NaN`, and a single outer `where` would still let NaN through the gradient.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class PolicyTerms(NamedTuple):
    """Per-token terms of a component with an importance ratio, and which members its trust region dropped."""

    terms_BT: jax.Array
    """[B, T] float, weighted loss per token; exactly 0.0 off the members."""
    dropped_high_BT: jax.Array
    """[B, T] bool, members without a policy term because their probability rose too much."""
    dropped_low_BT: jax.Array
    """[B, T] bool, members without a policy term because their probability fell too much."""


def probability_gap(trainer_logprobs_BT: jax.Array, inference_logprobs_BT: jax.Array) -> jax.Array:
    """Return how much each token's probability rose since it was sampled, `exp(trainer) - exp(inference)`, in [-1, 1].

    Args:
      trainer_logprobs_BT: [B, T] float, log-probability under the current weights.
      inference_logprobs_BT: [B, T] float, log-probability under the policy that sampled the token.

    Returns:
      [B, T] float; carries no gradient.
    """
    logprobs = [trainer_logprobs_BT, inference_logprobs_BT]
    chex.assert_rank(logprobs, 2)
    chex.assert_equal_shape(logprobs)
    chex.assert_type(logprobs, float)
    return jax.lax.stop_gradient(jnp.exp(trainer_logprobs_BT) - jnp.exp(inference_logprobs_BT))


def policy_terms(
    log_ratio_BT: jax.Array, credit_BT: jax.Array, weights_BT: jax.Array, is_kept_BT: jax.Array, *, kl_tau: float
) -> jax.Array:
    """Return `weight * (-kept * credit * exp(d) + kl_tau * d^2)` per token, where d is the log-ratio.

    The ratio is differentiated and not clipped. A token that is not kept, or has no credit, has no policy term at all,
    so a ratio that overflows there reaches neither value nor gradient; it still pays the squared log-ratio, which is
    finite.

    Args:
      log_ratio_BT: [B, T] float, trainer minus inference logprob; 0.0 off the members.
      credit_BT: [B, T] float, advantage or signal per token; 0.0 off the members.
      weights_BT: [B, T] float, scale of the whole term; 0.0 off the members.
      is_kept_BT: [B, T] bool, members inside the trust region.
      kl_tau: scale of the squared log-ratio.

    Returns:
      [B, T] float, exactly 0.0 off the members.
    """
    arrays = [log_ratio_BT, credit_BT, weights_BT, is_kept_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    chex.assert_type(arrays, [float, float, float, bool])
    has_policy_term_BT = is_kept_BT & (credit_BT != 0)
    ratio_BT = jnp.exp(jnp.where(has_policy_term_BT, log_ratio_BT, 0))
    policy_BT = jnp.where(has_policy_term_BT, credit_BT * ratio_BT, 0)
    return weights_BT * (kl_tau * jnp.square(log_ratio_BT) - policy_BT)
