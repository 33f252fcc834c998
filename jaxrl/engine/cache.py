"""What the engine keeps on the device between ticks, the key-value cache, and the three programs that touch it.

Weights and every setting that a user may vary are arguments: only the model's shape, the number of slots, the window
and the prompt buckets are compiled in, and engines of equal shapes share the compiled programs. The cache is donated to
each program that changes it. Nothing here decides which request goes where.

Shape letters: S slots, W window, R prefill rows, T bucket length, N insertions, V vocabulary, Q decode steps of one
call.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from jaxrl.engine.sampling import SamplingArrays, sample_tokens
from jaxrl.models.decode import DecodeParams, KVCache, LayerKV, TokenScores, decode_step, prefill, score, score_with_top
from jaxrl.models.spec import ModelSpec


def cache_bytes(spec: ModelSpec, num_slots: int, window: int, dtype: str) -> int:
    """Return the size in bytes of the key-value cache that `init_cache` makes."""
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * jnp.dtype(dtype).itemsize
    return num_slots * window * per_token


def init_cache(spec: ModelSpec, num_slots: int, window: int, dtype: jnp.dtype) -> KVCache:
    """Return an empty key-value cache: per layer [S, K, W, E] keys and values."""
    shape = (num_slots, spec.num_kv_heads, window, spec.head_dim)
    return [LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(spec.num_layers)]


def insert_prompts(cache: KVCache, prompt_kv: KVCache, rows_N: jax.Array, slots_N: jax.Array) -> KVCache:
    """Write prefilled rows into the first columns of slots; one row may go to many slots.

    Args:
      cache: [S, K, W, E] per layer.
      prompt_kv: [R, K, T, E] per layer with T <= W.
      rows_N: [N] int32, which prefilled row.
      slots_N: [N] int32, which slot; an index >= S is dropped.

    Returns:
      The cache with columns 0..T-1 of the given slots replaced.
    """
    chex.assert_rank([rows_N, slots_N], 1)
    chex.assert_equal_shape([rows_N, slots_N])
    chex.assert_type([rows_N, slots_N], int)
    length = prompt_kv[0].keys.shape[2]

    def insert(old_SKWE: jax.Array, new_RKTE: jax.Array) -> jax.Array:
        return old_SKWE.at[slots_N, :, :length].set(new_RKTE[rows_N], mode="drop")

    return jax.tree.map(insert, cache, prompt_kv)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def prefill_into_slots(
    params: DecodeParams, cache: KVCache, token_ids_RT: jax.Array, rows_N: jax.Array, slots_N: jax.Array, *, spec: ModelSpec
) -> KVCache:
    """Compute prompts (see `models.decode.prefill`) and insert them (see `insert_prompts`); `cache` is donated."""
    return insert_prompts(cache, prefill(params, token_ids_RT, spec=spec), rows_N, slots_N)


@functools.partial(jax.jit, static_argnames=("spec", "num_steps", "num_top"), donate_argnames="cache")
def decode_and_sample(
    params: DecodeParams,
    cache: KVCache,
    token_ids_S: jax.Array,
    position_ids_S: jax.Array,
    sampling: SamplingArrays,
    *,
    spec: ModelSpec,
    num_steps: int,
    num_top: int = 0,
) -> tuple[KVCache, jax.Array]:
    """Sample `num_steps` tokens per slot, each fed back as the next one's input; `cache` is donated.

    Args:
      params: the policy.
      cache: [S, K, W, E] per layer.
      token_ids_S: [S] int32, the token to feed first.
      position_ids_S: [S] int32, its position.
      sampling: per-slot settings.
      spec: the architecture.
      num_steps: Q.
      num_top: K, the most alternatives per token that any slot may want; 0 leaves them out of the program.

    Returns:
      The cache, and [3 + 2K, S, Q] int32: token ids, the bits of their float32 logprobs, near-tie flags, K alternatives
      and the bits of their logprobs. One array, so that a tick makes one transfer to the host.
    """

    def step(carry: tuple[KVCache, jax.Array, jax.Array], _: None) -> tuple[tuple[KVCache, jax.Array, jax.Array], jax.Array]:
        cache, token_ids_S, position_ids_S = carry
        logits_SV, cache = decode_step(params, cache, token_ids_S, position_ids_S, spec=spec)
        sampled = sample_tokens(logits_SV, position_ids_S + 1, sampling, num_top=num_top)
        packed_3S = jnp.stack([
            sampled.token_ids_S,
            jax.lax.bitcast_convert_type(sampled.logprobs_S, jnp.int32),
            sampled.is_near_tie_S.astype(jnp.int32),
            *sampled.top_ids_SK.T,
            *jax.lax.bitcast_convert_type(sampled.top_logprobs_SK, jnp.int32).T,
        ])  # fmt: skip
        return (cache, sampled.token_ids_S, position_ids_S + 1), packed_3S

    carry = (cache, token_ids_S, position_ids_S)
    if num_steps == 1:
        (cache, _, _), packed_3S = step(carry, None)
        return cache, packed_3S[:, :, None]
    (cache, _, _), packed_Q3S = jax.lax.scan(step, carry, length=num_steps)
    return cache, jnp.moveaxis(packed_Q3S, 0, 2)


@functools.partial(jax.jit, static_argnames=("spec", "num_top"))
def score_rows_with_top(
    params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, wants_top: jax.Array, *, spec: ModelSpec, num_top: int
) -> TokenScores:
    """Return logprobs, ranks and alternatives of given tokens; see `models.decode.score_with_top`."""
    return score_with_top(params, token_ids_RT, temperatures_R, wants_top, spec=spec, num_top=num_top)


@functools.partial(jax.jit, static_argnames="spec")
def score_rows(params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, *, spec: ModelSpec) -> jax.Array:
    """Return [R, T] float32 logprobs of given tokens; see `models.decode.score`."""
    return score(params, token_ids_RT, temperatures_R, spec=spec)
