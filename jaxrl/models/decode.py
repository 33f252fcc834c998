"""The engine's view of a network: the trainer's weights laid out for decoding, and the pure functions that run on them.

`to_decode_params` turns the stacked parameter tree into one small dict per layer with fused projections, in the
engine's dtype and with every kernel as `[out, in]`. `prefill` computes a prompt's keys and values, `decode_step`
advances every slot by one token, `score` gives the logprobs of given tokens. Logits and softmax are float32. Nothing
here samples, schedules or owns a buffer.

Shape letters: S slots, R rows, T positions of a row, W window (cache columns), D hidden, V vocabulary, H heads, K kv
heads, G = H/K, E head_dim, F feed-forward, Q queries of a kv head, N any number of rows, O outputs of a projection, I
its inputs; b blocks, r rows of a group, w columns of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp

from jaxrl.models.layers import apply_rope, rms_norm, rope_tables
from jaxrl.models.spec import ModelSpec

T = TypeVar("T")
A = TypeVar("A")

MASKED = -1e30
"""Attention score of a column that may not be seen: finite, so that a row without any visible column cannot make a
NaN."""
BLOCK = 128
"""Columns of keys, and query positions of a row, that attention takes at a time: what bounds its memory, and the steps
in which its cost follows the visible length."""
HEAD_ROWS = 256
"""Rows of logits that exist at a time while sequences are scored."""
GROUP_TOKENS = 128
"""Tokens of rows that are run together: fewer make slow matrix products, more make a lone row pay for empty ones."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeParams:
    """One policy version as the engine holds it; every array is in the engine's dtype."""

    embed_VD: jax.Array
    """[V, D] token embedding."""
    layers: list[dict[str, jax.Array]]
    """Per layer: `input_norm` [D], `qkv` [(H+2K)*E, D], `o` [D, H*E], `post_attention_norm` [D], `gate_up` [2F, D],
    `down` [D, F]; `qkv_bias` [(H+2K)*E] in families with attention biases, `q_norm` and `k_norm` [E] in families that
    have them."""
    final_norm_D: jax.Array
    """[D] scale of the last norm."""
    head_VD: jax.Array | None
    """[V, D] output projection; None when it is the embedding itself."""

    @property
    def output_VD(self) -> jax.Array:
        """The output projection, tied or not."""
        return self.embed_VD if self.head_VD is None else self.head_VD


class LayerKV(NamedTuple):
    """Keys and values of one layer, rotary positions applied to the keys."""

    keys: jax.Array
    """[N, K, E, W]: columns last, which is how XLA's CPU backend multiplies a few queries with them fastest."""
    values: jax.Array
    """[N, K, W, E]."""


class RowScores(NamedTuple):
    """What the policy says of given tokens, each judged by those before it."""

    logprobs: jax.Array
    """[R, T] float32."""
    ranks: jax.Array
    """[R, T] int32, 1 for the likeliest."""
    top_ids: jax.Array
    """[R, T, num_top] int32, the likeliest tokens, best first."""
    top_logprobs: jax.Array
    """[R, T, num_top] float32."""


KVCache = list[LayerKV]
"""One `LayerKV` per layer. A list, never a stacked array: scanning layers over a cache copies the whole cache each
step."""


def to_decode_params(params: Mapping[str, Any], spec: ModelSpec, dtype: str) -> DecodeParams:
    """Lay the trainer's parameters out for decoding.

    Casts to `dtype`, unstacks the layers, fuses q, k, v into one kernel and gate, up into another, and turns kernels to
    `[out, in]`. Every output is a fresh buffer, also where nothing changes, so the trainer may donate its state while
    the engine decodes.

    Args:
      params: the model's parameter tree with layers stacked on a leading axis.
      spec: the architecture.
      dtype: `float32` or `bfloat16`.

    Returns:
      The engine's parameters.

    Raises:
      AssertionError: a kernel does not have the shape that `spec` says.
    """
    stacked = params["layers"]
    attention, mlp = stacked["attention"], stacked["mlp"]
    chex.assert_shape(params["embed"]["weight"], (spec.vocab_size, spec.hidden_size))
    chex.assert_shape(attention["q_proj"]["kernel"], (spec.num_layers, spec.hidden_size, spec.query_size))
    chex.assert_shape(attention["k_proj"]["kernel"], (spec.num_layers, spec.hidden_size, spec.kv_size))
    chex.assert_shape(mlp["down_proj"]["kernel"], (spec.num_layers, spec.intermediate_size, spec.hidden_size))

    def own(x: jax.Array) -> jax.Array:
        # Invariant: an explicit copy, so that an unchanged input never becomes an output: the trainer donates it to its
        # next step.
        return jnp.array(x, dtype=dtype, copy=True)

    def fused(parts: list[jax.Array]) -> jax.Array:
        return own(jnp.concatenate(parts, axis=-1).T)

    layers = []
    for i in range(spec.num_layers):
        qkv = [attention[name] for name in ("q_proj", "k_proj", "v_proj")]
        layer = {
            "input_norm": own(stacked["input_norm"]["scale"][i]),
            "qkv": fused([p["kernel"][i] for p in qkv]),
            "o": fused([attention["o_proj"]["kernel"][i]]),
            "post_attention_norm": own(stacked["post_attention_norm"]["scale"][i]),
            "gate_up": fused([mlp[name]["kernel"][i] for name in ("gate_proj", "up_proj")]),
            "down": fused([mlp["down_proj"]["kernel"][i]]),
        }
        if spec.has_attention_bias:
            layer["qkv_bias"] = fused([p["bias"][i] for p in qkv])
        if spec.has_qk_norm:
            layer |= {name: own(attention[name]["scale"][i]) for name in ("q_norm", "k_norm")}
        layers.append(layer)
    return DecodeParams(
        embed_VD=own(params["embed"]["weight"]),
        layers=layers,
        final_norm_D=own(params["final_norm"]["scale"]),
        head_VD=None if spec.is_tied else own(params["lm_head"]["weight"]),
    )


def prefill(params: DecodeParams, token_ids_RT: jax.Array, *, spec: ModelSpec) -> KVCache:
    """Compute the keys and values of right-padded prompts that start at position 0.

    Columns at or after a prompt's length hold the padding's keys; no one may look at them.

    Args:
      params: the policy.
      token_ids_RT: [R, T] int32.
      spec: the architecture.

    Returns:
      Per layer keys [R, K, E, T] and values [R, K, T, E].
    """
    return _run_rows(params, token_ids_RT, spec)[1]


def decode_step(
    params: DecodeParams, cache: KVCache, token_ids_S: jax.Array, position_ids_S: jax.Array, *, spec: ModelSpec
) -> tuple[jax.Array, KVCache]:
    """Feed one token per slot and return the logits of the next.

    Each slot owns its position: its keys and values go to cache column `position`, and it sees columns 0..position. A
    slot's result does not depend on what other slots hold; the time does, by the longest of them.

    Args:
      params: the policy.
      cache: keys [S, K, E, W] and values [S, K, W, E] per layer; donate it.
      token_ids_S: [S] int32, the token to feed.
      position_ids_S: [S] int32, its 0-based position; a write at or past the window is dropped.
      spec: the architecture.

    Returns:
      [S, V] float32 logits, and the cache with one more column per slot.
    """
    chex.assert_rank([token_ids_S, position_ids_S], 1)
    chex.assert_equal_shape([token_ids_S, position_ids_S])
    chex.assert_type([token_ids_S, position_ids_S], int)
    slots_S = jnp.arange(token_ids_S.shape[0])
    rope = rope_tables(position_ids_S[:, None], spec.head_dim, spec.rope_theta, spec.rope_scaling)
    num_columns = position_ids_S.max() + 1
    x_SD = params.embed_VD[token_ids_S]
    new_cache: KVCache = []
    for weights, (keys, values) in zip(params.layers, cache, strict=True):
        q_SH1E, k_SK1E, v_SK1E = _queries_keys_values(weights, x_SD, rope, spec)
        keys = keys.at[slots_S, :, :, position_ids_S].set(k_SK1E[:, :, 0], mode="drop")
        values = values.at[slots_S, :, position_ids_S].set(v_SK1E[:, :, 0], mode="drop")
        q_SKGE = q_SH1E.reshape(-1, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        mixed_SKGE = _attend(q_SKGE, LayerKV(keys, values), position_ids_S[:, None], num_columns)
        x_SD = _finish_layer(weights, x_SD, mixed_SKGE.reshape(x_SD.shape[0], -1), spec)
        new_cache.append(LayerKV(keys, values))
    return _logits(params, x_SD, spec), new_cache


def score(params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, *, spec: ModelSpec) -> jax.Array:
    """Return the logprob of each given token under the softmax of its row's logits divided by the row's temperature.

    Args:
      params: the policy.
      token_ids_RT: [R, T] int32, right-padded; position 0 first.
      temperatures_R: [R] float32, > 0; 0 marks a row that nobody looks at, which is skipped where that saves time.
      spec: the architecture.

    Returns:
      [R, T] float32, index t speaks of token t given those before it; index 0 is 0.0.
    """

    def logprobs(logits_TV: jax.Array, chosen_T: jax.Array) -> jax.Array:
        return chosen_T - jax.nn.logsumexp(logits_TV, axis=1)

    return _score_rows(params, token_ids_RT, temperatures_R, logprobs, spec)


def score_with_top(
    params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, wants_top: jax.Array, *, spec: ModelSpec, num_top: int
) -> RowScores:
    """Do what `score` does, and if `wants_top` also say what was likelier at each place.

    Args:
      params: the policy.
      token_ids_RT: [R, T] int32, right-padded; position 0 first.
      temperatures_R: [R] float32, > 0; 0 marks a row that nobody looks at, which is skipped where that saves time.
      wants_top: bool; False leaves ranks and alternatives at 0 and costs nothing.
      spec: the architecture.
      num_top: K >= 1.

    Returns:
      Logprobs, ranks and alternatives; index 0 of each row is 0.
    """
    num_top = min(num_top, spec.vocab_size)

    def look(logits_TV: jax.Array, chosen_T: jax.Array) -> RowScores:
        normaliser_T = jax.nn.logsumexp(logits_TV, axis=1)

        def alternatives() -> tuple[jax.Array, jax.Array, jax.Array]:
            values_TK, ids_TK = jax.lax.top_k(logits_TV, num_top)
            rank_T = 1 + (logits_TV > chosen_T[:, None]).sum(axis=1, dtype=jnp.int32)
            return rank_T, ids_TK, values_TK - normaliser_T[:, None]

        shape = (len(chosen_T), num_top)
        nothing = jnp.zeros(shape[:1], jnp.int32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return RowScores(chosen_T - normaliser_T, *jax.lax.cond(wants_top, alternatives, lambda: nothing))

    return _score_rows(params, token_ids_RT, temperatures_R, look, spec)


def _score_rows(
    params: DecodeParams, token_ids_RT: jax.Array, temperatures_R: jax.Array, of_row: Callable[[jax.Array, jax.Array], T], spec: ModelSpec
) -> T:
    """Apply `of_row` to the tempered logits [T-1, V] of each row and those of its own tokens [T-1]; put a 0 before each result."""
    chex.assert_rank([token_ids_RT, temperatures_R], [2, 1])
    chex.assert_type([token_ids_RT, temperatures_R], [int, float])
    chex.assert_equal(token_ids_RT.shape[0], temperatures_R.shape[0])
    rows, length = token_ids_RT.shape
    group = group_rows(rows, length)

    def score_group(of_group: tuple[jax.Array, jax.Array]) -> T:
        token_ids_rT, temperatures_r = of_group
        hidden_rTD = _run_rows(params, token_ids_rT, spec)[0][:, :-1]
        given = hidden_rTD.reshape(-1, spec.hidden_size), token_ids_rT[:, 1:].reshape(-1), jnp.repeat(temperatures_r, length - 1)
        return jax.tree.map(lambda x: x.reshape(group, length - 1, *x.shape[1:]), _in_chunks(score_tokens, given, HEAD_ROWS))

    def score_tokens(given: tuple[jax.Array, jax.Array, jax.Array]) -> T:
        hidden_ND, token_ids_N, temperatures_N = given
        logits_NV = _logits(params, hidden_ND, spec) / jnp.where(temperatures_N > 0, temperatures_N, 1.0)[:, None]
        return of_row(logits_NV, jnp.take_along_axis(logits_NV, token_ids_N[:, None], axis=1)[:, 0])

    def score_or_skip(of_group: tuple[jax.Array, jax.Array]) -> T:
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score_group, of_group))
        return jax.lax.cond((of_group[1] > 0).any(), score_group, lambda _: nothing, of_group)

    padded = pad_to_multiple(token_ids_RT, group), pad_to_multiple(temperatures_R, group)
    tails = jax.lax.map(score_or_skip, jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), padded))
    tails = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], tails)
    return jax.tree.map(lambda tail: jnp.pad(tail, ((0, 0), (1, 0)) + ((0, 0),) * (tail.ndim - 2)), tails)


def group_rows(num_rows: int, length: int) -> int:
    """Return how many rows of this length are run together: about `GROUP_TOKENS` tokens, at least one row.

    Example:
      >>> group_rows(8, 16), group_rows(4, 16), group_rows(8, 512)
      (8, 4, 1)
    """
    return max(1, min(num_rows, GROUP_TOKENS // length))


def pad_to_multiple(x: jax.Array, divisor: int) -> jax.Array:
    """Append zeros on the first axis until `divisor` divides it.

    Example:
      >>> pad_to_multiple(jnp.arange(1, 4), 2).tolist()
      [1, 2, 3, 0]
    """
    return jnp.pad(x, ((0, -len(x) % divisor), *((0, 0),) * (x.ndim - 1)))


def _in_chunks(function: Callable[[A], T], arrays: A, size: int) -> T:
    """Apply a function of rows to at most `size` of them at a time, one chunk after the other."""
    num_rows = len(jax.tree.leaves(arrays)[0])
    if num_rows <= size:
        return function(arrays)
    chunks = jax.tree.map(lambda x: pad_to_multiple(x, size).reshape(-1, size, *x.shape[1:]), arrays)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], jax.lax.map(function, chunks))


def _run_rows(params: DecodeParams, token_ids_RT: jax.Array, spec: ModelSpec) -> tuple[jax.Array, KVCache]:
    """Run whole rows from position 0; return the last layer's output [R, T, D] and the keys and values."""
    chex.assert_rank(token_ids_RT, 2)
    chex.assert_type(token_ids_RT, int)
    rows, length = token_ids_RT.shape
    rope = rope_tables(jnp.broadcast_to(jnp.arange(length)[None], (rows, length)), spec.head_dim, spec.rope_theta, spec.rope_scaling)
    # Tokens flattened to one axis: a two-dimensional matmul is what XLA's CPU backend runs fastest.
    x_ND = params.embed_VD[token_ids_RT.reshape(-1)]
    kv: KVCache = []
    for weights in params.layers:
        q_RHTE, k_RKTE, v_RKTE = _queries_keys_values(weights, x_ND, rope, spec)
        kv.append(LayerKV(jnp.swapaxes(k_RKTE, 2, 3), v_RKTE))
        x_ND = _finish_layer(weights, x_ND, _attend_causally(q_RHTE, kv[-1], spec), spec)
    return x_ND.reshape(rows, length, -1), kv


def _attend_causally(q_RHTE: jax.Array, kv: LayerKV, spec: ModelSpec) -> jax.Array:
    """Let each position see itself and those before it, a block of queries at a time; return [R * T, H * E]."""
    rows, _, length, head_dim = q_RHTE.shape
    size = min(length, BLOCK)
    q_TRHE = pad_to_multiple(q_RHTE.transpose(2, 0, 1, 3), size)
    heads_per_kv = spec.num_heads // spec.num_kv_heads
    # The queries of a kv head: one axis of (head, position).
    q_bRKQE = q_TRHE.reshape(-1, size, rows, spec.num_kv_heads, heads_per_kv, head_dim).transpose(0, 2, 3, 4, 1, 5)
    q_bRKQE = q_bRKQE.reshape(-1, rows, spec.num_kv_heads, heads_per_kv * size, head_dim)

    def attend_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_RKQE, start = block
        last_seen_1Q = jnp.tile(start + jnp.arange(size), heads_per_kv)[None]
        return _attend(q_RKQE, kv, last_seen_1Q, start + size)

    starts_b = size * jnp.arange(len(q_bRKQE))
    mixed = attend_block((q_bRKQE[0], starts_b[0]))[None] if len(q_bRKQE) == 1 else jax.lax.map(attend_block, (q_bRKQE, starts_b))
    mixed = mixed.reshape(-1, rows, spec.num_heads, size, head_dim).transpose(1, 0, 3, 2, 4)
    return mixed.reshape(rows, -1, spec.num_heads * head_dim)[:, :length].reshape(rows * length, -1)


def _attend(q_NKQE: jax.Array, kv: LayerKV, last_seen_NQ: jax.Array, num_columns: jax.Array) -> jax.Array:
    """Mix the values of the columns that each query sees, `BLOCK` columns at a time.

    A running maximum and a running sum give the softmax over all columns. Blocks at or after `num_columns` are never
    touched, and one in which a query sees nothing leaves its sums as they are bit by bit, so a query's result does not
    depend on how far the others look.

    Args:
      q_NKQE: [N, K, Q, E] queries.
      kv: keys [N, K, E, W] and values [N, K, W, E].
      last_seen_NQ: [N, Q] or [1, Q] or [N, 1] int32 >= 0, the last column that a query sees.
      num_columns: int32, no query sees a column at or after it.

    Returns:
      [N, K, Q, E] in the dtype of the values.

    Reference: Milakov and Gimelshein 2018, Online normalizer calculation for softmax, https://arxiv.org/abs/1805.02867,
      algorithm 3.
    """
    window = kv.values.shape[2]
    size = min(BLOCK, window)
    last_seen = last_seen_NQ[:, None, :, None]

    def add_block(index: jax.Array | int, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak_NKQ, mass_NKQ, mixed_NKQE = sums
        # The last block of a window that is no multiple starts early; what the block before it had is left out.
        start = jnp.minimum(index * size, window - size)
        keys_NKEw = jax.lax.dynamic_slice_in_dim(kv.keys, start, size, axis=3) if window > size else kv.keys
        values_NKwE = jax.lax.dynamic_slice_in_dim(kv.values, start, size, axis=2) if window > size else kv.values
        column = (start + jnp.arange(size))[None, None, None, :]
        scores_NKQw = jnp.einsum("nkqe,nkew->nkqw", q_NKQE, keys_NKEw, preferred_element_type=jnp.float32) * q_NKQE.shape[3] ** -0.5
        scores_NKQw = jnp.where((column >= index * size) & (column <= last_seen), scores_NKQw, MASKED)
        new_peak_NKQ = jnp.maximum(peak_NKQ, scores_NKQw.max(axis=3))
        shrink_NKQ = jnp.exp(peak_NKQ - new_peak_NKQ)
        weights_NKQw = jnp.exp(scores_NKQw - new_peak_NKQ[..., None])
        new_mass_NKQ = mass_NKQ * shrink_NKQ + weights_NKQw.sum(axis=3)
        here_NKQE = jnp.einsum("nkqw,nkwe->nkqe", weights_NKQw.astype(values_NKwE.dtype), values_NKwE, preferred_element_type=jnp.float32)
        return new_peak_NKQ, new_mass_NKQ, mixed_NKQE * shrink_NKQ[..., None] + here_NKQE

    shape = q_NKQE.shape[:3]
    sums = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q_NKQE.shape, jnp.float32)
    if window <= size:
        _, mass_NKQ, mixed_NKQE = add_block(0, sums)
    else:
        num_blocks = jnp.minimum(-(-num_columns // size), -(-window // size))
        _, mass_NKQ, mixed_NKQE = jax.lax.fori_loop(0, num_blocks, add_block, sums)
    return (mixed_NKQE / mass_NKQ[..., None]).astype(kv.values.dtype)


def _queries_keys_values(
    weights: dict[str, jax.Array], x_ND: jax.Array, rope: tuple[jax.Array, jax.Array], spec: ModelSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return one layer's rotated queries [R, H, T, E], rotated keys and values [R, K, T, E]; N = R * T."""
    rows, length = rope[0].shape[:2]
    qkv_NO = _project(rms_norm(x_ND, weights["input_norm"], spec.rms_norm_eps), weights["qkv"])
    if spec.has_attention_bias:
        qkv_NO = qkv_NO + weights["qkv_bias"][None]
    heads = jnp.swapaxes(qkv_NO.reshape(rows, length, -1, spec.head_dim), 1, 2)
    q, k, v = jnp.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
    if spec.has_qk_norm:
        q, k = rms_norm(q, weights["q_norm"], spec.rms_norm_eps), rms_norm(k, weights["k_norm"], spec.rms_norm_eps)
    return apply_rope(q, *rope), apply_rope(k, *rope), v


def _finish_layer(weights: dict[str, jax.Array], x_ND: jax.Array, mixed_NO: jax.Array, spec: ModelSpec) -> jax.Array:
    """Add the attention output and the gated feed-forward to the residual stream."""
    x_ND = x_ND + _project(mixed_NO, weights["o"])
    normed_ND = rms_norm(x_ND, weights["post_attention_norm"], spec.rms_norm_eps)
    gate_NF, up_NF = jnp.split(_project(normed_ND, weights["gate_up"]), 2, axis=1)
    return x_ND + _project(jax.nn.silu(gate_NF) * up_NF, weights["down"])


def _logits(params: DecodeParams, x_ND: jax.Array, spec: ModelSpec) -> jax.Array:
    """Return [N, V] float32 logits of residual-stream rows."""
    normed_ND = rms_norm(x_ND, params.final_norm_D, spec.rms_norm_eps)
    return jnp.matmul(params.output_VD, normed_ND.T, preferred_element_type=jnp.float32).T


def _project(x_NI: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Return `x @ weight.T`, so written that the weight is read by rows: XLA's CPU backend follows the written order."""
    return (weight_OI @ x_NI.T).T
