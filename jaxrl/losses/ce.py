"""The ce component: weighted cross-entropy on the tokens as they are, for demonstrations and observations.

In: temperature-1 logprobs and weights, 0.0 off the members. Out: one term per token. It never reads the loss mask, an
advantage or the logprob at which a token was sampled.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import chex
import jax


def ce_terms(trainer_logprobs_raw_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Return `-weight * logprob` per token, at temperature 1.

    Args:
      trainer_logprobs_raw_BT: [B, T] float, temperature-1 logprobs under the current weights; 0.0 off the members.
      weights_BT: [B, T] float, scale of each token's term; 0.0 off the members.

    Returns:
      [B, T] float, exactly 0.0 off the members.
    """
    streams = [trainer_logprobs_raw_BT, weights_BT]
    chex.assert_rank(streams, 2)
    chex.assert_equal_shape(streams)
    chex.assert_type(streams, float)
    return -weights_BT * trainer_logprobs_raw_BT
