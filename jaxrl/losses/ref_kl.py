"""The ref_kl component: reverse KL to a reference, as a policy gradient whose credit is the reference's log-ratio.

In: tempered and temperature-1 logprobs, reference logprobs and weights, 0.0 off the members. Out: `PolicyTerms`. It has
no settings and reads no advantage: distillation ships none.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl.losses.importance import PolicyTerms, policy_terms, probability_gap

REF_KL_MASK_LOW = 0.2
"""A token is dropped when its probability fell by more than this since it was sampled; there is no upper side."""
REF_KL_KL_TAU = 1e-3
"""Scale of the squared log-ratio between the trainer's and the sampling policy."""


def ref_kl_terms(
    trainer_logprobs_BT: jax.Array,
    trainer_logprobs_raw_BT: jax.Array,
    inference_logprobs_BT: jax.Array,
    ref_logprobs_BT: jax.Array,
    weights_BT: jax.Array,
    members_BT: jax.Array,
) -> PolicyTerms:
    """Push up tokens that the reference likes more than the policy does, and down the others.

    term = -kept * s * r + 1e-3 * d^2 with the signal s = ref - raw held constant, d = trainer - inference, r = exp(d).
    The signal compares temperature-1 logprobs, as the reference gives; the ratio is at the sampling temperature. In
    expectation over the policy's own samples the gradient at r = 1 is that of KL(policy || reference).

    Args:
      trainer_logprobs_BT: [B, T] float, current weights, sampling temperature; the only input with a gradient.
      trainer_logprobs_raw_BT: [B, T] float, current weights, temperature 1.
      inference_logprobs_BT: [B, T] float, the policy that sampled the token.
      ref_logprobs_BT: [B, T] float, the reference, temperature 1.
      weights_BT: [B, T] float, scale of each token's whole term.
      members_BT: [B, T] bool, tokens of this component; every float above is 0.0 off them.

    Returns:
      Weighted terms and the dropped members (only ever on the low side).

    Reference: Lu et al. 2025, On-Policy Distillation, https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    streams = [trainer_logprobs_BT, trainer_logprobs_raw_BT, inference_logprobs_BT, ref_logprobs_BT, weights_BT]
    chex.assert_rank(members_BT, 2)
    chex.assert_equal_shape([*streams, members_BT])
    chex.assert_type([*streams, members_BT], [float] * len(streams) + [bool])
    signal_BT = jax.lax.stop_gradient(ref_logprobs_BT - trainer_logprobs_raw_BT)
    gap_BT = probability_gap(trainer_logprobs_BT, inference_logprobs_BT)
    dropped_low_BT = members_BT & (gap_BT < -REF_KL_MASK_LOW)
    terms_BT = policy_terms(
        trainer_logprobs_BT - inference_logprobs_BT,
        signal_BT,
        weights_BT,
        members_BT & ~dropped_low_BT,
        kl_tau=REF_KL_KL_TAU,
    )
    return PolicyTerms(terms_BT, jnp.zeros_like(dropped_low_BT), dropped_low_BT)
