"""Picking the next token of every slot from its logits, with settings that are arrays, never compiled-in constants.

In: [S, V] float32 logits, the absolute position of the token to be sampled, and per-slot settings. Out: token ids,
logprobs under the distribution that was sampled from, and a flag where rounding could have picked another token. A
token's noise depends on nothing but its request's seed, its position and its id, so text does not depend on the slot or
on the rest of the batch.

Shape letters: S slots, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

NEAR_TIE = 1e-4
"""Two perturbed logits closer than this may swap places when float32 sums are taken in another order."""


class SamplingArrays(NamedTuple):
    """Sampling settings of every slot; a field of `TokenSampling` each."""

    temperature_S: jax.Array
    """[S] float32 >= 0; 0 takes the likeliest token."""
    top_k_S: jax.Array
    """[S] int32; 0 keeps all tokens."""
    top_p_S: jax.Array
    """[S] float32 in (0, 1]."""
    min_p_S: jax.Array
    """[S] float32 in [0, 1)."""
    seed_S2: jax.Array
    """[S, 2] uint32: low and high half of the 63-bit seed."""
    num_top_S: jax.Array | None = None
    """[S] int32 >= 0, how many alternatives the slot wants; None where no slot may want any."""


class Sampled(NamedTuple):
    """One sampled token per slot."""

    token_ids_S: jax.Array
    """[S] int32."""
    logprobs_S: jax.Array
    """[S] float32."""
    is_near_tie_S: jax.Array
    """[S] bool, True where the two best perturbed logits differ by less than `NEAR_TIE`."""
    top_ids_SK: jax.Array
    """[S, K] int32, the likeliest tokens before noise, best first; zeros when no slot wants any."""
    top_logprobs_SK: jax.Array
    """[S, K] float32, under the same distribution as `logprobs_S`; minus infinity for a token that truncation left out."""


def sample_tokens(logits_SV: jax.Array, position_ids_S: jax.Array, sampling: SamplingArrays, *, num_top: int = 0) -> Sampled:
    """Sample one token per slot by the Gumbel-max rule.

    The logits are divided by the temperature, truncated by min-p, top-k and top-p in this order, and perturbed with
    Gumbel noise; the largest wins, which is an exact draw from the softmax. `logprobs` is of that tempered, truncated
    and renormalised softmax. At temperature 0 the largest logit wins, nothing is truncated, and the logprob is the one
    at temperature 1, since that of a point mass says nothing. Equal values go to the lower token id.

    Args:
      logits_SV: [S, V] float32.
      position_ids_S: [S] int32, absolute position of the token to be sampled.
      sampling: per-slot settings.
      num_top: K, alternatives per token; they are looked for only while some slot's `num_top_S` asks for one.

    Returns:
      The tokens. A slot whose logits are not finite gets a logprob that is not finite.

    Reference: Maddison et al. 2014, A* Sampling, https://arxiv.org/abs/1411.0030, section 2.
    """
    chex.assert_rank([logits_SV, position_ids_S], [2, 1])
    chex.assert_type([logits_SV, position_ids_S], [jnp.float32, int])
    per_slot = [position_ids_S, sampling.temperature_S, sampling.top_k_S, sampling.top_p_S, sampling.min_p_S]
    chex.assert_shape(per_slot, logits_SV.shape[:1])
    num_tokens = logits_SV.shape[1]
    is_greedy_S = sampling.temperature_S == 0
    scaled_SV = logits_SV / jnp.where(is_greedy_S, 1.0, sampling.temperature_S)[:, None]
    is_truncated_S = ~is_greedy_S & ((sampling.top_k_S > 0) | (sampling.top_p_S < 1) | (sampling.min_p_S > 0))
    # The sort costs more than the rest of a small model's step, so it runs only when a slot asks for it.
    is_kept_SV = jax.lax.cond(
        is_truncated_S.any(),
        lambda: kept_tokens(scaled_SV, sampling) | ~is_truncated_S[:, None],
        lambda: jnp.ones(scaled_SV.shape, bool),
    )
    scaled_SV = jnp.where(is_kept_SV, scaled_SV, -jnp.inf)
    noise_SV = gumbel_noise(sampling.seed_S2, position_ids_S, num_tokens)
    perturbed_SV = scaled_SV + jnp.where(is_greedy_S[:, None], 0.0, noise_SV)

    best_S = perturbed_SV.max(axis=1)
    token_ids_SV = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[None, :], perturbed_SV.shape)
    winners_SV = jnp.where(perturbed_SV == best_S[:, None], token_ids_SV, num_tokens)
    token_ids_S = jnp.minimum(winners_SV.min(axis=1), num_tokens - 1)
    second_S = jnp.where(token_ids_SV == token_ids_S[:, None], -jnp.inf, perturbed_SV).max(axis=1)
    chosen_S = jnp.take_along_axis(scaled_SV, token_ids_S[:, None], axis=1)[:, 0]
    normaliser_S = jax.nn.logsumexp(scaled_SV, axis=1)
    top_ids_SK, top_logprobs_SK = _likeliest(scaled_SV, normaliser_S, sampling.num_top_S, min(num_top, num_tokens))
    return Sampled(token_ids_S, chosen_S - normaliser_S, best_S - second_S < NEAR_TIE, top_ids_SK, top_logprobs_SK)


def _likeliest(scaled_SV: jax.Array, normaliser_S: jax.Array, num_top_S: jax.Array | None, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Return ids and logprobs [S, num_top] of the likeliest tokens; zeros, at no cost, while no slot wants any."""
    shape = (len(scaled_SV), num_top)
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    if num_top == 0 or num_top_S is None:
        return nothing

    def look() -> tuple[jax.Array, jax.Array]:
        values_SK, ids_SK = jax.lax.top_k(scaled_SV, num_top)
        return ids_SK, values_SK - normaliser_S[:, None]

    return jax.lax.cond((num_top_S > 0).any(), look, lambda: nothing)


def gumbel_noise(seed_S2: jax.Array, position_ids_S: jax.Array, num_tokens: int) -> jax.Array:
    """Return [S, num_tokens] float32 standard Gumbel noise, a pure function of (seed, position, token id).

    Counter-based: the seed is the key of a Threefry-2x32 block cipher and (position, token id) its counter, so every
    position of every request has a stream of its own and no state is carried.

    Args:
      seed_S2: [S, 2] uint32.
      position_ids_S: [S] int32, absolute position of the token to be sampled.
      num_tokens: size of the vocabulary.

    Returns:
      The noise.

    Reference: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    chex.assert_rank([seed_S2, position_ids_S], [2, 1])
    chex.assert_shape(seed_S2, (position_ids_S.shape[0], 2))
    chex.assert_type([seed_S2, position_ids_S], [jnp.uint32, int])
    num_blocks = -(-num_tokens // 2)

    def bits_of_slot(seed_2: jax.Array, position_id: jax.Array) -> jax.Array:
        position = jnp.full(num_blocks, position_id, jnp.uint32)
        counters = jnp.concatenate([position, jnp.arange(num_blocks, dtype=jnp.uint32)])
        return threefry_2x32((seed_2[0], seed_2[1]), counters)[:num_tokens]

    bits_SV = jax.vmap(bits_of_slot)(seed_S2, position_ids_S)
    # The half step keeps u above 0, and `log1p(-u)` keeps full precision there: a small u is a large Gumbel value,
    # which is what wins.
    uniform_SV = (bits_SV.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    exponential_SV = -jnp.log1p(-jnp.minimum(uniform_SV, jnp.float32(1 - 2**-24)))
    return -jnp.log(exponential_SV)


def kept_tokens(scaled_SV: jax.Array, sampling: SamplingArrays) -> jax.Array:
    """Say which tokens survive min-p, then top-k, then top-p (each on what the one before left, renormalised).

    Min-p keeps tokens at least `min_p` times as likely as the likeliest. Top-p keeps the shortest prefix, likeliest
    first, whose mass reaches `top_p`. The likeliest token always survives; of equally likely ones the lower id comes
    first.

    Args:
      scaled_SV: [S, V] float32 logits divided by the temperature.
      sampling: per-slot settings.

    Returns:
      [S, V] bool.

    Reference: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751 (top-p); Nguyen et al. 2024,
      https://arxiv.org/abs/2407.01082 (min-p).
    """
    chex.assert_rank(scaled_SV, 2)
    chex.assert_type(scaled_SV, float)
    chex.assert_shape([sampling.top_k_S, sampling.top_p_S, sampling.min_p_S], scaled_SV.shape[:1])
    num_slots, num_tokens = scaled_SV.shape
    ranks_1V = jnp.arange(num_tokens)[None, :]
    order_SV = jnp.argsort(-scaled_SV, axis=1, stable=True)
    sorted_SV = jnp.take_along_axis(scaled_SV, order_SV, axis=1)
    top_k_S1 = jnp.where(sampling.top_k_S > 0, sampling.top_k_S, num_tokens)[:, None]
    keep_SV = (sorted_SV - sorted_SV[:, :1] >= jnp.log(sampling.min_p_S)[:, None]) & (ranks_1V < top_k_S1)
    probs_SV = jax.nn.softmax(jnp.where(keep_SV, sorted_SV, -jnp.inf), axis=1)
    mass_before_SV = jnp.cumsum(probs_SV, axis=1) - probs_SV
    # Rounding may bring the running mass to 1 before the last token, hence the explicit test for "off".
    keep_SV &= (mass_before_SV < sampling.top_p_S[:, None]) | (sampling.top_p_S >= 1)[:, None]
    keep_SV |= ranks_1V == 0
    return jnp.zeros(scaled_SV.shape, bool).at[jnp.arange(num_slots)[:, None], order_SV].set(keep_SV, unique_indices=True)
