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

from jaxrl.engine.sampling import Sampled, SamplingArrays, sample_tokens
from jaxrl.models.decode import (
    DecodeParams,
    KVCache,
    LayerKV,
    RowScores,
    decode_step,
    group_rows,
    pad_to_multiple,
    prefill,
    score,
    score_with_top,
)
from jaxrl.models.spec import ModelSpec

SAMPLED_LOGITS = 2**19
"""Logits that are sampled from at a time, in whole slots."""


def cache_bytes(spec: ModelSpec, num_slots: int, window: int, dtype: str) -> int:
    """Return the size in bytes of the key-value cache that `init_cache` makes."""
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * jnp.dtype(dtype).itemsize
    return num_slots * window * per_token


def init_cache(spec: ModelSpec, num_slots: int, window: int, dtype: jnp.dtype) -> KVCache:
    """Return an empty key-value cache: per layer keys [S, K, E, W] and values [S, K, W, E]."""
    keys, values = (num_slots, spec.num_kv_heads, spec.head_dim, window), (num_slots, spec.num_kv_heads, window, spec.head_dim)
    return [LayerKV(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(spec.num_layers)]


def insert_prompts(cache: KVCache, prompt_kv: KVCache, rows_N: jax.Array, slots_N: jax.Array) -> KVCache:
    """Write prefilled rows into the first columns of slots; one row may go to many slots.

    Args:
      cache: keys [S, K, E, W] and values [S, K, W, E] per layer.
      prompt_kv: keys [R, K, E, T] and values [R, K, T, E] per layer with T <= W.
      rows_N: [N] int32, which prefilled row; one outside of [0, R) is skipped.
      slots_N: [N] int32, which slot; an index >= S is skipped.

    Returns:
      The cache with columns 0..T-1 of the given slots replaced. The time is that of what is written.
    """
    chex.assert_rank([rows_N, slots_N], 1)
    chex.assert_equal_shape([rows_N, slots_N])
    chex.assert_type([rows_N, slots_N], int)
    rows_N, slots_N = jnp.asarray(rows_N), jnp.asarray(slots_N)
    is_meant_N = (rows_N >= 0) & (rows_N < len(prompt_kv[0].keys)) & (slots_N < len(cache[0].keys))
    meant_first_N = jnp.argsort(~is_meant_N, stable=True)

    def insert(n: jax.Array, cache: KVCache) -> KVCache:
        row, slot = rows_N[meant_first_N[n]], slots_N[meant_first_N[n]]

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(new, row, 1), (slot, 0, 0, 0))

        return jax.tree.map(write, cache, prompt_kv)

    return jax.lax.fori_loop(0, is_meant_N.sum(), insert, cache)


@functools.partial(jax.jit, donate_argnames="cache")
def clear_slots(cache: KVCache, is_cleared_S: jax.Array) -> KVCache:
    """Write zeros into whole slots; `cache` is donated.

    Columns that no query sees have weight 0, and 0 times a NaN that a broken request left there would still be NaN.
    """
    return jax.tree.map(lambda x: jnp.where(is_cleared_S[:, None, None, None], 0, x), cache)


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def prefill_into_slots(
    params: DecodeParams, cache: KVCache, token_ids_RT: jax.Array, rows_N: jax.Array, slots_N: jax.Array, *, spec: ModelSpec
) -> KVCache:
    """Compute prompts (see `models.decode.prefill`) and insert them (see `insert_prompts`); `cache` is donated.

    Rows after the last one that goes to a slot are not computed: the time follows the number of prompts, not R.
    """
    group = group_rows(*token_ids_RT.shape)
    num_rows = jnp.where(slots_N < len(cache[0].keys), rows_N + 1, 0).max()
    token_ids_RT = pad_to_multiple(token_ids_RT, group)

    def run_group(index: jax.Array, cache: KVCache) -> KVCache:
        token_ids_rT = jax.lax.dynamic_slice_in_dim(token_ids_RT, index * group, group)
        return insert_prompts(cache, prefill(params, token_ids_rT, spec=spec), rows_N - index * group, slots_N)

    return jax.lax.fori_loop(0, -(-num_rows // group), run_group, cache)


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
      cache: keys [S, K, E, W] and values [S, K, W, E] per layer.
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
        sampled = _sample_by_groups(logits_SV, position_ids_S + 1, sampling, num_top)
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


def _sample_by_groups(logits_SV: jax.Array, position_ids_S: jax.Array, sampling: SamplingArrays, num_top: int) -> Sampled:
    """Do what `sample_tokens` does, for so few slots at a time that its temporary arrays stay small.

    Memory that a program asks for in one large piece is new to the process at each call, and its pages cost more than
    the sampling.
    """
    num_slots, num_tokens = logits_SV.shape
    size = next(n for n in range(num_slots, 0, -1) if num_slots % n == 0 and (n * num_tokens <= SAMPLED_LOGITS or n == 1))
    if size == num_slots:
        return sample_tokens(logits_SV, position_ids_S, sampling, num_top=num_top)
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (logits_SV, position_ids_S, sampling))
    sampled = jax.lax.map(lambda group: sample_tokens(*group, num_top=num_top), groups)
    return jax.tree.map(lambda x: x.reshape(num_slots, *x.shape[2:]), sampled)


@functools.partial(jax.jit, static_argnames=("spec", "num_top"))
def score_rows_with_top(
    params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, wants_top: jax.Array, *, spec: ModelSpec, num_top: int
) -> RowScores:
    """Return logprobs, ranks and alternatives of given tokens; see `models.decode.score_with_top`."""
    return score_with_top(params, token_ids_RT, temperatures_R, wants_top, spec=spec, num_top=num_top)


@functools.partial(jax.jit, static_argnames="spec")
def score_rows(params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, *, spec: ModelSpec) -> jax.Array:
    """Return [R, T] float32 logprobs of given tokens; see `models.decode.score`."""
    return score(params, token_ids_RT, temperatures_R, spec=spec)
