"""Logprobs and entropy of every token, from hidden states and the output head, without ever holding `[B, T, V]` logits.

In: final hidden states, the head, token ids, segment ids and temperatures of a micro-batch. Out: `TokenScores`, three
`[B, T]` arrays whose index `t` speaks of token `t`. The head runs over chunks of positions; the backward pass
recomputes a chunk's logits from two saved numbers per token. It does not apply a loss mask: every token that has a
predecessor in its own segment is scored.

Shape letters: B rows, T positions, D hidden, V vocabulary, C chunks, N tokens of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.config.trainer import BATCH_AXES, DATA_AXIS, FSDP_AXIS, MESH_AXES, TENSOR_AXIS

_BLOCK_LOGITS = 2**19
"""Logits that a CPU turns into scores at one time: they stay in its cache over the five passes that this takes."""


class TokenScores(NamedTuple):
    """What the policy says about every token; 0.0 without gradient where a token has no context (see `has_context`)."""

    logprobs: jax.Array
    """[B, T] float32, log-probability of token t under the distribution tempered by `temperatures[t]`."""
    logprobs_raw: jax.Array
    """[B, T] float32, log-probability of token t at temperature 1."""
    entropy: jax.Array
    """[B, T] float32, entropy in nats of the tempered distribution that token t was drawn from; carries no gradient."""


def has_context(segment_ids_BT: jax.Array) -> jax.Array:
    """Say which tokens have a predecessor in their own segment: only those are scored, and may be trained.

    Args:
      segment_ids_BT: [B, T] integer, 0 is padding.

    Returns:
      [B, T] bool; False on padding and on the first token of every segment.

    Example:
      >>> has_context(jnp.array([[1, 1, 2, 2, 0, 0]])).tolist()
      [[False, True, False, True, False, False]]
    """
    chex.assert_rank(segment_ids_BT, 2)
    chex.assert_type(segment_ids_BT, int)
    continues_BT = (segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]) & (segment_ids_BT[:, 1:] != 0)
    return jnp.pad(continues_BT, ((0, 0), (1, 0)))


def token_scores(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    token_ids_BT: jax.Array,
    segment_ids_BT: jax.Array,
    temperatures_BT: jax.Array,
    *,
    chunk_tokens: int,
    mesh: Mesh | None = None,
) -> TokenScores:
    """Score every token under the policy.

    Its logprob is `log softmax(head @ hidden[t-1] / temperatures[t])[token t]`; beside it stand the untempered one and
    the entropy.

    Only tokens with context are scored. Whatever the hidden states, ids and temperatures hold elsewhere (NaN and
    infinity included) reaches neither a value nor a gradient. Softmax and sums are float32 for inputs of any precision.
    The gradient of the logprobs flows to the hidden states and the head.

    Args:
      hidden_BTD: [B, T, D] float, final hidden states; row t predicts token t+1.
      head_VD: [V, D] float, the output head.
      token_ids_BT: [B, T] integer in [0, V) on tokens with context.
      segment_ids_BT: [B, T] integer, 0 is padding.
      temperatures_BT: [B, T] float > 0 on tokens with context: the temperature that token t was sampled at.
      chunk_tokens: tokens whose logits exist at one time, >= 1. A chunk takes the same positions of every row, so it
        has one token per row at least. With `mesh` the rows are those of one device, without it all of them.
      mesh: where the rows are split over `BATCH_AXES`, and the width of the head over fsdp. Each device then scores its
        own rows; the head is gathered once per call, in the precision of the hidden states, and its gradient is
        reduced once, in the head's own. Without it the partitioner does both for every chunk.

    Returns:
      Scores of every token.
    """
    chex.assert_rank([hidden_BTD, head_VD], [3, 2])
    chex.assert_equal_shape([token_ids_BT, segment_ids_BT, temperatures_BT])
    chex.assert_shape(token_ids_BT, hidden_BTD.shape[:2])
    chex.assert_equal(hidden_BTD.shape[2], head_VD.shape[1])
    chex.assert_type([hidden_BTD, head_VD, token_ids_BT, segment_ids_BT, temperatures_BT], [float, float, int, int, float])
    assert chunk_tokens >= 1, f"`chunk_tokens` must be at least 1, got {chunk_tokens!r}"
    arrays = (hidden_BTD, head_VD, token_ids_BT, segment_ids_BT, temperatures_BT)
    split_axes = () if mesh is None else tuple(axis for axis in MESH_AXES if mesh.shape[axis] > 1)
    row_axes = tuple(axis for axis in BATCH_AXES if axis in split_axes)
    layout = _HeadLayout(is_vocab_split=TENSOR_AXIS in split_axes, is_width_split=FSDP_AXIS in split_axes)
    score_rows = functools.partial(_score_rows, chunk_tokens=chunk_tokens, layout=layout)
    if not row_axes:
        return score_rows(*arrays)
    rows, head = PartitionSpec(row_axes), PartitionSpec(None, FSDP_AXIS if layout.is_width_split else None)

    def score_own_rows(hidden_BTD: jax.Array, head_VD: jax.Array, *streams_BT: jax.Array) -> TokenScores:
        if DATA_AXIS in row_axes:
            # Marked as varying, the one sum of its gradient over replicas is outside of the loop over chunks.
            head_VD = jax.lax.pcast(head_VD, DATA_AXIS, to="varying")
        return score_rows(hidden_BTD, head_VD, *streams_BT)

    return jax.shard_map(score_own_rows, mesh=mesh, in_specs=(rows, head, rows, rows, rows), out_specs=rows, axis_names=set(row_axes))(
        *arrays
    )


class _HeadLayout(NamedTuple):
    """How the head [V, D] lies on the devices that score with it."""

    is_vocab_split: bool
    """Over tensor, by the partitioner."""
    is_width_split: bool
    """Over fsdp, inside a `shard_map`: it is gathered and its gradient scattered here."""

    def gather(self, head_VD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The whole width, cast first: half the bytes move."""
        head_VD = head_VD.astype(dtype)
        if not self.is_width_split:
            return head_VD
        return self._on_own_words(functools.partial(jax.lax.all_gather, axis_name=FSDP_AXIS, axis=1, tiled=True))(head_VD)

    def scatter(self, d_head_VD: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Sum the gradient over fsdp before it is rounded to the head's precision; each device keeps its own columns."""
        if self.is_width_split:
            scatter = functools.partial(jax.lax.psum_scatter, axis_name=FSDP_AXIS, scatter_dimension=1, tiled=True)
            d_head_VD = self._on_own_words(scatter)(d_head_VD)
        return d_head_VD.astype(dtype)

    def _on_own_words(self, communicate: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """Let each device exchange only its own part of a split vocabulary: the partitioner would make it whole first."""
        if not self.is_vocab_split:
            return communicate
        words = PartitionSpec(TENSOR_AXIS)
        return jax.shard_map(communicate, in_specs=words, out_specs=words, axis_names={TENSOR_AXIS})


def _score_rows(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    token_ids_BT: jax.Array,
    segment_ids_BT: jax.Array,
    temperatures_BT: jax.Array,
    *,
    chunk_tokens: int,
    layout: _HeadLayout,
) -> TokenScores:
    """Cut the rows that predict a token into chunks, score them, and put the scores back where their tokens are."""
    num_rows, length = token_ids_BT.shape
    is_scored = has_context(segment_ids_BT)[:, 1:]
    # Double where: what has no context is replaced before the maths here and after it below.
    hidden = jnp.where(is_scored[:, :, None], hidden_BTD[:, :-1], 0)
    targets = jnp.where(is_scored, token_ids_BT[:, 1:], 0)
    temperatures = jnp.where(is_scored, temperatures_BT[:, 1:], 1)

    num_chunks = max(1, -(-(length - 1) // max(1, chunk_tokens // num_rows)))
    chunk_length = max(1, -(-(length - 1) // num_chunks))
    num_filled = num_chunks * chunk_length - (length - 1)

    def split(array: jax.Array, fill: int) -> jax.Array:
        """[B, T-1, ...] to [C, N, ...]: whole rows stay on their device, since chunks run along positions."""
        tail = array.shape[2:]
        array = jnp.pad(array, ((0, 0), (0, num_filled)) + ((0, 0),) * len(tail), constant_values=fill)
        array = jnp.moveaxis(array.reshape(num_rows, num_chunks, chunk_length, *tail), 1, 0)
        return array.reshape(num_chunks, num_rows * chunk_length, *tail)

    def join(scores_CN: jax.Array) -> jax.Array:
        """[C, N] back to [B, T], 0.0 where nothing was scored."""
        scores = jnp.moveaxis(scores_CN.reshape(num_chunks, num_rows, chunk_length), 0, 1).reshape(num_rows, -1)
        return jnp.pad(jnp.where(is_scored, scores[:, : length - 1], 0), ((0, 0), (1, 0)))

    scores: Any = _score_chunks(split(hidden, 0), head_VD, split(targets, 0), split(temperatures, 1), layout)
    return TokenScores(*map(join, scores))


def _logits(hidden_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
    """[N, V] logits, accumulated and returned in float32 or better."""
    dtype = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    return jnp.einsum("nd,vd->nv", hidden_ND, head_VD, preferred_element_type=dtype)


def _is_target(targets: jax.Array, vocab_size: int) -> jax.Array:
    """[..., V] one-hot of targets [...]; a comparison, not a gather, so that a split vocabulary stays split."""
    return jax.lax.broadcasted_iota(targets.dtype, (*targets.shape, vocab_size), targets.ndim) == targets[..., None]


def _score_token(token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """Tempered logprob, raw logprob, entropy, and the log-normalisers of both, from one token's logits [V]."""
    logits_V, target, temperature = token
    peak = jnp.max(logits_V)
    centred_V = logits_V - peak
    tempered_V = centred_V / temperature
    weights_V = jnp.exp(tempered_V)
    weight_sum = jnp.sum(weights_V)
    log_sum = jnp.log(weight_sum)
    log_sum_raw = jnp.log(jnp.sum(jnp.exp(centred_V)))
    chosen = jnp.sum(jnp.where(_is_target(target, logits_V.shape[0]), logits_V, 0)) - peak
    entropy = log_sum - jnp.sum(weights_V * tempered_V) / weight_sum
    return chosen / temperature - log_sum, chosen - log_sum_raw, entropy, peak / temperature + log_sum, peak + log_sum_raw


def _score_logits(
    logits_NV: jax.Array, targets_N: jax.Array, temperatures_N: jax.Array, is_vocab_split: bool
) -> tuple[jax.Array, ...]:
    """`_score_token` of every token, a few at a time where that keeps their logits in a CPU's cache."""
    tokens = logits_NV, targets_N, temperatures_N
    num_tokens, vocab_size = logits_NV.shape
    most = max(1, _BLOCK_LOGITS // vocab_size)
    # A divisor: the remainder of another size would be cut out by a copy of all logits. Each block of a split vocabulary
    # would cost a reduction between devices.
    block = next(size for size in range(min(most, num_tokens), 0, -1) if num_tokens % size == 0)
    whole = jax.vmap(_score_token)
    if is_vocab_split or block == num_tokens or 8 * block < most:
        return whole(tokens)
    return jax.lax.platform_dependent(tokens, cpu=functools.partial(jax.lax.map, _score_token, batch_size=block), default=whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _score_chunks(
    hidden_CND: jax.Array, head_VD: jax.Array, targets_CN: jax.Array, temperatures_CN: jax.Array, layout: _HeadLayout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tempered logprobs, raw logprobs and entropy, [C, N] each; entropy has no gradient."""
    return _score_chunks_forward(hidden_CND, head_VD, targets_CN, temperatures_CN, layout)[0]


def _score_chunks_forward(hidden_CND, head_VD, targets_CN, temperatures_CN, layout):
    """Score each chunk; keep the two log-normalisers per token that the backward pass cannot do without."""
    whole_VD = layout.gather(head_VD, hidden_CND.dtype)

    def score(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden_ND, targets_N, temperatures_N = chunk
        return _score_logits(_logits(hidden_ND, whole_VD), targets_N, temperatures_N, layout.is_vocab_split)

    *scores, log_norm_CN, log_norm_raw_CN = jax.lax.map(score, (hidden_CND, targets_CN, temperatures_CN))
    return tuple(scores), (head_VD, whole_VD, (hidden_CND, targets_CN, temperatures_CN, log_norm_CN, log_norm_raw_CN))


def _score_chunks_backward(layout, residuals, cotangents):
    """Turn `d loss / d logprobs` into gradients of the hidden states and the head, adding the latter up in float32."""
    head_VD, whole_VD, chunks = residuals
    d_logprobs_CN, d_logprobs_raw_CN, _ = cotangents

    def step(d_head_VD: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden_ND, targets_N, temperatures_N, log_norm_N, log_norm_raw_N, d_logprobs_N, d_raw_N = chunk
        logits_NV = _logits(hidden_ND, whole_VD)
        d_tempered_N = d_logprobs_N / temperatures_N
        probs_NV = jnp.exp(logits_NV / temperatures_N[:, None] - log_norm_N[:, None])
        probs_raw_NV = jnp.exp(logits_NV - log_norm_raw_N[:, None])
        at_target_NV = jnp.where(_is_target(targets_N, logits_NV.shape[1]), (d_tempered_N + d_raw_N)[:, None], 0)
        d_logits_NV = at_target_NV - d_tempered_N[:, None] * probs_NV - d_raw_N[:, None] * probs_raw_NV
        # Both products run in the inputs' own precision and add up in float32, as the forward product does.
        d_logits_NV = d_logits_NV.astype(hidden_ND.dtype)
        d_hidden_ND = jnp.einsum("nv,vd->nd", d_logits_NV, whole_VD, preferred_element_type=logits_NV.dtype)
        d_head_VD += jnp.einsum("nv,nd->vd", d_logits_NV, hidden_ND, preferred_element_type=logits_NV.dtype)
        return d_head_VD, d_hidden_ND.astype(hidden_ND.dtype)

    zero_VD = jnp.zeros_like(whole_VD, dtype=d_logprobs_CN.dtype)
    d_head_VD, d_hidden_CND = jax.lax.scan(step, zero_VD, (*chunks, d_logprobs_CN, d_logprobs_raw_CN))
    return d_hidden_CND, layout.scatter(d_head_VD, head_VD.dtype), None, None


_score_chunks.defvjp(_score_chunks_forward, _score_chunks_backward)
