"""Causal attention inside segments: tokens packed into one row see only the earlier tokens of their own sample.

In go projected hidden states, rotary tables and a visibility mask; out comes the attention output. Scores and softmax
are float32 whatever the compute dtype is. The whole [T, T] score matrix of a row exists at one time: there is no
blockwise kernel here.

Letters: B rows, T positions, S key positions, D hidden, H query heads, K key/value heads, G = H / K, E head_dim,
N = B * T.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.models.layers import Linear, RMSNorm, apply_rope
from jaxrl.models.mesh import pin
from jaxrl.models.spec import ModelSpec


def visible_keys(segment_ids_BT: jax.Array) -> jax.Array:
    """Which keys each query sees: those at or before it, of the same segment.

    Padding (segment 0) is a segment like any other, so every query sees at least itself and no softmax is empty.

    Args:
      segment_ids_BT: [B, T] int.

    Returns:
      [B, T, S] bool, S = T.

    Example:
      >>> visible_keys(jnp.array([[1, 1, 2]]))[0].astype(int).tolist()
      [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    chex.assert_rank(segment_ids_BT, 2)
    chex.assert_type(segment_ids_BT, int)
    is_same_segment = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    is_causal = jnp.tril(jnp.ones((segment_ids_BT.shape[1],) * 2, bool))
    return is_same_segment & is_causal[None]


def masked_attention(q_BHTE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention over the visible keys, query head h using key/value head h // G.

    softmax(q k^T / sqrt(E)) v with invisible keys left out. A non-finite value reaches only the queries that see its
    key, never the others, although 0 * NaN is NaN: it is replaced by 0 in the product and made visible as a NaN score.

    Args:
      q_BHTE: [B, H, T, E] float.
      k_BKSE: [B, K, S, E] float; H is a multiple of K.
      v_BKSE: [B, K, S, E] float.
      mask_BTS: [B, T, S] bool, True where the query sees the key; at least one True per query.

    Returns:
      [B, H, T, E] in the dtype of `q_BHTE`.

    Reference: Ainslie et al. 2023, GQA, https://arxiv.org/abs/2305.13245, section 2.2.
    """
    chex.assert_rank([q_BHTE, k_BKSE, v_BKSE, mask_BTS], [4, 4, 4, 3])
    chex.assert_type([q_BHTE, k_BKSE, v_BKSE, mask_BTS], [float, float, float, bool])
    B, H, T, E = q_BHTE.shape
    K, S = k_BKSE.shape[1:3]
    chex.assert_equal_shape([k_BKSE, v_BKSE])
    chex.assert_shape(mask_BTS, (B, T, S))
    q_BKGTE = q_BHTE.reshape(B, K, H // K, T, E)
    is_finite_BKSE = jnp.isfinite(v_BKSE)
    is_broken_BKS = ~jnp.all(is_finite_BKSE, axis=-1)
    scores = jnp.einsum("bkgte,bkse->bkgts", q_BKGTE, k_BKSE, preferred_element_type=jnp.float32) * E**-0.5
    scores = jnp.where(is_broken_BKS[:, :, None, None, :], jnp.nan, scores)
    scores = jnp.where(mask_BTS[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKSE.dtype)
    out = jnp.einsum("bkgts,bkse->bkgte", weights, jnp.where(is_finite_BKSE, v_BKSE, 0))
    return out.reshape(B, H, T, E)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and an optional norm on query and key heads."""

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs) -> None:
        self.q_proj = Linear(spec.hidden_size, spec.query_size, has_bias=spec.has_attention_bias, rngs=rngs)
        self.k_proj = Linear(spec.hidden_size, spec.kv_size, has_bias=spec.has_attention_bias, rngs=rngs)
        self.v_proj = Linear(spec.hidden_size, spec.kv_size, has_bias=spec.has_attention_bias, rngs=rngs)
        self.o_proj = Linear(spec.query_size, spec.hidden_size, rngs=rngs)
        if spec.has_qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.spec = spec

    def __call__(self, x_ND: jax.Array, rope: tuple[jax.Array, jax.Array], mask_BTT: jax.Array, mesh: Mesh | None) -> jax.Array:
        """[N, D] -> [N, D]; `rope` from `rope_tables`, `mask_BTT` from `visible_keys`."""
        B, T = mask_BTT.shape[:2]

        def split_heads(y_NC: jax.Array, axis: str) -> jax.Array:
            heads = y_NC.reshape(B, T, -1, self.spec.head_dim).transpose(0, 2, 1, 3)
            return pin(heads, mesh, ("rows", axis, "positions", "head_dim"))

        q = split_heads(self.q_proj(x_ND), "heads")
        k = split_heads(self.k_proj(x_ND), "kv_heads")
        v = split_heads(self.v_proj(x_ND), "kv_heads")
        if self.spec.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out_BHTE = masked_attention(apply_rope(q, *rope), apply_rope(k, *rope), v, mask_BTT)
        return self.o_proj(out_BHTE.transpose(0, 2, 1, 3).reshape(B * T, -1))
