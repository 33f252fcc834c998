"""The small parts of a decoder: norm, rotary embedding, linear map, embedding table, gated feed-forward.

Arrays in, arrays out; modules only declare parameters and apply them. Norms and rotations are computed in float32
whatever the compute dtype is. Nothing here knows how layers are stacked or where parameters come from.

Letters: N tokens of all rows flattened, B rows, T positions, D hidden, E head_dim, F feed-forward.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl.models.mesh import pin
from jaxrl.models.spec import RopeScaling

INIT_STD = 0.02
"""Standard deviation of freshly drawn weights."""


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last dimension, then scale.

    y = x / sqrt(mean(x^2) + eps) * scale, computed in float32. A row of zeros gives zeros.

    Args:
      x: [..., D] float, any leading shape.
      scale: [D] float.
      eps: added to the mean square; > 0.

    Returns:
      [..., D] in the dtype of `x`.

    Example:
      >>> rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2), 0.0).tolist()
      [0.8485281467437744, 1.1313709020614624]

    Reference: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467,
      equation 4.
    """
    chex.assert_type([x, scale], float)
    chex.assert_shape(scale, x.shape[-1:])
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * inverse_rms * weight).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each rotated pair.

    Without scaling, pair i turns by f_i = theta^(-2i / head_dim) per position, a wavelength of w_i = 2 pi / f_i positions.
    With Llama 3's scaling, L0 the length of first training and s = clip((L0 / w_i - low) / (high - low), 0, 1), it turns by
    s * f_i + (1 - s) * f_i / factor: short wavelengths (below L0 / high) are kept, long ones (above L0 / low) stretched by
    `factor`, those between are blended.

    Args:
      head_dim: width of a head; even.
      theta: base of the wavelengths.
      scaling: None for none.

    Returns:
      [head_dim / 2] float32.

    Example:
      >>> rope_frequencies(4, 100.0).tolist()
      [1.0, 0.10000000149011612]

    Reference: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2; the scaling is Llama 3.1's, as
      published with its weights: https://github.com/meta-llama/llama-models, models/llama3/model.py, `apply_scaling`.
    """
    # In numpy: the numbers are fixed before any program is traced, so every program turns by the same angles.
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        wavelengths_per_length = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = np.clip((wavelengths_per_length - scaling.low_freq_factor) / span, 0.0, 1.0)
        frequencies = kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def rope_tables(position_ids_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary embedding at given positions: of p times the pair's `rope_frequencies`.

    Args:
      position_ids_BT: [B, T] int, position of each token inside its own sequence.
      head_dim: width of a head; even.
      theta: base of the wavelengths.
      scaling: None for none.

    Returns:
      (cos, sin), each [B, T, head_dim / 2] float32.

    Reference: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2.
    """
    chex.assert_rank(position_ids_BT, 2)
    chex.assert_type(position_ids_BT, int)
    frequencies = jnp.asarray(rope_frequencies(head_dim, theta, scaling))
    angles = position_ids_BT.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BHTE: jax.Array, cos_BTe: jax.Array, sin_BTe: jax.Array) -> jax.Array:
    """Rotate each head's pairs (i, i + E/2) by the angles of its position.

    Args:
      x_BHTE: [B, heads, T, E] float.
      cos_BTe: [B, T, E/2] float32, from `rope_tables`.
      sin_BTe: [B, T, E/2] float32.

    Returns:
      [B, heads, T, E] in the dtype of `x_BHTE`; rotated in float32.

    Reference: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864, section 3.4.2.
    """
    chex.assert_rank([x_BHTE, cos_BTe, sin_BTe], [4, 3, 3])
    chex.assert_equal_shape([cos_BTe, sin_BTe])
    chex.assert_type([x_BHTE, cos_BTe, sin_BTe], float)
    chex.assert_equal(x_BHTE.shape[3], 2 * cos_BTe.shape[2])
    cos, sin = cos_BTe[:, None], sin_BTe[:, None]
    first, second = jnp.split(x_BHTE.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BHTE.dtype)


def _linear(x_ND: jax.Array, kernel_DF: jax.Array, bias_F: jax.Array | None) -> jax.Array:
    """X @ kernel + bias in the precision of x, with the gradients of more precise parameters summed in their own.

    Without it those gradients would be rounded to the precision of x on every device, and then summed over devices in it.
    """
    y_NF = x_ND @ kernel_DF.astype(x_ND.dtype)
    return y_NF if bias_F is None else y_NF + bias_F.astype(x_ND.dtype)[None]


def _project_forward(x_ND, kernel_DF, bias_F):
    # Not `_project`: a rematerialisation policy looks for the product, and would not see it inside of a `custom_vjp`.
    return _linear(x_ND, kernel_DF, bias_F), (x_ND, kernel_DF, bias_F)


def _project_backward(residuals, d_y_NF):
    x_ND, kernel_DF, bias_F = residuals
    d_x_ND = d_y_NF @ kernel_DF.astype(d_y_NF.dtype).T
    d_kernel_DF = jnp.einsum("nd,nf->df", x_ND, d_y_NF, preferred_element_type=kernel_DF.dtype)
    return d_x_ND, d_kernel_DF, None if bias_F is None else jnp.sum(d_y_NF, axis=0, dtype=bias_F.dtype)


_project = jax.custom_vjp(_linear)
_project.defvjp(_project_forward, _project_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table_VD: jax.Array, token_ids_BT: jax.Array, dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> jax.Array:
    """Rows of a table in `dtype`, NaN for an id outside; the gradients of a token's uses are summed in the table's own precision."""
    # The table is made whole along its width first: left alone, the partitioner exchanges activations instead. It is cast,
    # and held to its layout, before that: half the bytes move.
    cast_VD = pin(table_VD.astype(dtype), mesh, ("vocab", "embed"))
    whole_VD = pin(cast_VD, mesh, ("vocab", "hidden"))
    return pin(jnp.take(whole_VD, token_ids_BT, axis=0, mode="fill"), mesh, ("rows", "positions", "hidden"))


def _look_up_forward(table_VD, token_ids_BT, dtype, mesh):
    return _look_up(table_VD, token_ids_BT, dtype, mesh), (table_VD, token_ids_BT)


def _look_up_backward(dtype, mesh, residuals, d_x_BTD):
    del dtype
    table_VD, token_ids_BT = residuals
    d_table_VD = jnp.zeros_like(table_VD).at[token_ids_BT].add(d_x_BTD.astype(table_VD.dtype), mode="drop")
    return pin(d_table_VD, mesh, ("vocab", "hidden")), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nnx.Module):
    """`rms_norm` with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.scale[...], self.eps)


class Linear(nnx.Module):
    """x @ kernel (+ bias) on flattened tokens: XLA's CPU backward of a three-dimensional product is much slower."""

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = False, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (num_in, num_out), jnp.float32))
        if has_bias:
            self.bias = nnx.Param(jnp.zeros((num_out,), jnp.float32))
        self.has_bias = has_bias

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        """[N, num_in] -> [N, num_out] in the dtype of the input."""
        chex.assert_rank(x_ND, 2)
        kernel_DF, bias_F = self.kernel[...], self.bias[...] if self.has_bias else None
        if kernel_DF.dtype != x_ND.dtype:
            return _project(x_ND, kernel_DF, bias_F)
        y_NF = x_ND @ kernel_DF
        return y_NF if bias_F is None else y_NF + bias_F[None]


class Embedding(nnx.Module):
    """A table of one vector per token; also holds an untied head, which has the same shape."""

    def __init__(self, num_tokens: int, size: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (num_tokens, size), jnp.float32))

    def __call__(self, token_ids_BT: jax.Array, dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> jax.Array:
        """[B, T] int -> [B, T, size]; an id outside the table gives NaN, so that it cannot go unnoticed."""
        return _look_up(self.weight[...], token_ids_BT, dtype, mesh)


class MLP(nnx.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x)).

    Reference: Shazeer 2020, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202, equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(hidden_size, intermediate_size, rngs=rngs)
        self.up_proj = Linear(hidden_size, intermediate_size, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, rngs=rngs)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        """[N, D] -> [N, D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
