"""The decoder shared by every family, and `Model`: its pure face over a nested dict of arrays.

nnx modules declare the network; `build_model` splits them once, without allocating anything, and from then on a model
is a frozen description and its parameters are a plain dict. Layers are stacked [L, ...] and run by one `lax.scan`.
Logits are not computed here: `hidden` and `head` are what a loss needs to score tokens chunk by chunk.

Letters: B rows, T positions, D hidden, V vocabulary, L layers, N = B * T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl.models.attention import Attention, visible_keys
from jaxrl.models.layers import MLP, Embedding, RMSNorm, rope_tables
from jaxrl.models.mesh import check_model_fits, param_shardings, pin, with_shardings
from jaxrl.models.spec import ModelSpec

Params = dict[str, Any]
"""Nested dict of arrays; the tree is drawn in `Model`."""

_KEEP_PROJECTIONS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
"""What is kept without `remat = "layer"`: products. Norms, rotations, activations and attention scores are recomputed.

Keeping those would cost more memory traffic than it saves arithmetic: on a CPU, gradients of 3 layers of width 128 over
32 x 128 tokens take a fifth less time without them, in 124 instead of 322 MB.
"""


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs) -> None:
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec, rngs=rngs)
        self.post_attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec.hidden_size, spec.intermediate_size, rngs=rngs)

    def __call__(self, x_ND: jax.Array, rope: tuple[jax.Array, jax.Array], mask_BTT: jax.Array, mesh: Mesh | None) -> jax.Array:
        """[N, D] -> [N, D]."""
        x_ND = x_ND + self.attention(self.input_norm(x_ND), rope, mask_BTT, mesh)
        x_ND = pin(x_ND, mesh, ("tokens", "hidden"))
        x_ND = x_ND + self.mlp(self.post_attention_norm(x_ND))
        return pin(x_ND, mesh, ("tokens", "hidden"))


class Transformer(nnx.Module):
    """Embedding, stacked layers, final norm, and an untied head's table."""

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs) -> None:
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, rngs=rngs)
        self.layers = nnx.split_rngs(splits=spec.num_layers)(nnx.vmap(lambda rngs: Block(spec, rngs=rngs)))(rngs)
        self.final_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        if not spec.is_tied:
            self.lm_head = Embedding(spec.vocab_size, spec.hidden_size, rngs=rngs)
        self.spec = spec

    def __call__(
        self,
        token_ids_BT: jax.Array,
        position_ids_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        compute_dtype: jax.typing.DTypeLike,
        remat: Literal["none", "layer"],
        mesh: Mesh | None,
    ) -> jax.Array:
        """See `Model.hidden`."""
        B, T = token_ids_BT.shape
        rope = rope_tables(position_ids_BT, self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling)
        mask_BTT = visible_keys(segment_ids_BT)
        # Invariant: padding enters as zeros and sees only padding, so its hidden states are zeros whatever ids it
        # carries.
        is_real_BT1 = (segment_ids_BT != 0)[:, :, None]
        x_BTD = jnp.where(is_real_BT1, self.embed(token_ids_BT, compute_dtype, mesh), 0)
        x_ND = pin(x_BTD.reshape(B * T, -1), mesh, ("tokens", "hidden"))
        block, layers = nnx.split(self.layers)

        def run_layer(x_ND: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(block, layer)(x_ND, rope, mask_BTT, mesh), None

        run_layer = jax.checkpoint(run_layer, prevent_cse=False, policy=None if remat == "layer" else _KEEP_PROJECTIONS)
        x_ND, _ = jax.lax.scan(run_layer, x_ND, layers)
        return pin(self.final_norm(x_ND).reshape(B, T, -1), mesh, ("rows", "positions", "hidden"))


@dataclass(frozen=True)
class Model:
    """A network without its weights: hashable, so a jitted function may close over it.

    Its parameters are a nested dict (`*_proj` may have a "bias"; q_norm and k_norm only if the spec has them):

        embed/weight [V, D]              layers/input_norm/scale [L, D]         layers/attention/q_proj/kernel [L, D, H*E]
        final_norm/scale [D]             layers/post_attention_norm/scale       layers/attention/{k,v}_proj/kernel [L, D, K*E]
        lm_head/weight [V, D] if untied  layers/mlp/{gate,up}_proj/kernel       layers/attention/o_proj/kernel [L, H*E, D]
                                         layers/mlp/down_proj/kernel [L, F, D]  layers/attention/{q,k}_norm/scale [L, E]
    """

    spec: ModelSpec
    """Shapes and arithmetic."""
    graphdef: nnx.GraphDef
    """The nnx modules, split from their parameters."""
    mesh: Mesh | None = None
    """Where activations are pinned; None on one device."""

    def hidden(
        self,
        params: Params,
        token_ids_BT: jax.Array,
        position_ids_BT: jax.Array,
        segment_ids_BT: jax.Array,
        *,
        compute_dtype: jax.typing.DTypeLike = jnp.float32,
        remat: Literal["none", "layer"] = "none",
    ) -> jax.Array:
        """Hidden states after the final norm, ready for the head.

        Attention is causal and stays inside a segment. Positions of segment 0 are padding: their hidden states are
        zeros, whatever token ids they carry, and they add nothing to any gradient. A token id outside the vocabulary
        gives NaN.

        Args:
          params: the dict drawn in the class docstring, float.
          token_ids_BT: [B, T] int.
          position_ids_BT: [B, T] int, counted from 0 inside each segment.
          segment_ids_BT: [B, T] int, 0 for padding.
          compute_dtype: dtype of activations and of the weights they meet; softmax, norms and rotations are float32
            regardless.
          remat: `layer` keeps only each layer's input for the backward pass; `none` keeps every projection's output
            too.

        Returns:
          [B, T, D] in `compute_dtype`.

        Raises:
          ConfigError: the mesh does not divide the rows.
        """
        chex.assert_rank([token_ids_BT, position_ids_BT, segment_ids_BT], 2)
        chex.assert_equal_shape([token_ids_BT, position_ids_BT, segment_ids_BT])
        chex.assert_type([token_ids_BT, position_ids_BT, segment_ids_BT], int)
        assert remat in ("none", "layer"), f"`remat` must be 'none' or 'layer', not {remat!r}"
        network = nnx.merge(self.graphdef, params)
        return network(token_ids_BT, position_ids_BT, segment_ids_BT, compute_dtype=compute_dtype, remat=remat, mesh=self.mesh)

    def head(self, params: Params) -> jax.Array:
        """[V, D] matrix that turns hidden states into logits; the embedding itself when tied, not a copy."""
        return params["embed" if self.spec.is_tied else "lm_head"]["weight"]

    def abstract_params(self, param_dtype: jax.typing.DTypeLike) -> Params:
        """Shape, dtype and (with a mesh) sharding of every parameter, without allocating any."""
        params = _abstract_params(self.spec, param_dtype)
        return params if self.mesh is None else with_shardings(self.mesh, params)


def build_model(spec: ModelSpec, mesh: Mesh | None = None) -> Model:
    """Describe a network; allocates nothing.

    Args:
      spec: its shapes.
      mesh: from `build_mesh`; None runs on one device.

    Raises:
      ConfigError: the mesh does not divide the heads or a parameter.
    """
    if mesh is not None:
        check_model_fits(spec, mesh)
        param_shardings(mesh, _abstract_params(spec, jnp.float32))
    return Model(spec, nnx.split(_abstract_transformer(spec))[0], mesh)


def init_params(model: Model, key: jax.Array, param_dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw fresh parameters: normal(0, 0.02) matrices, norms of one, biases of zero; sharded as the model's mesh asks.

    Args:
      model: from `build_model`.
      key: PRNG key; the same key gives the same numbers on any mesh.
      param_dtype: dtype of every leaf.

    Returns:
      The parameter dict drawn in `Model`.
    """

    def draw(key: jax.Array) -> Params:
        params = nnx.to_pure_dict(nnx.state(Transformer(model.spec, rngs=nnx.Rngs(key))))
        return jax.tree.map(lambda leaf: leaf.astype(param_dtype), params)

    shardings = None if model.mesh is None else param_shardings(model.mesh, model.abstract_params(param_dtype))
    return jax.jit(draw, out_shardings=shardings)(key)


def _abstract_transformer(spec: ModelSpec) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))


def _abstract_params(spec: ModelSpec, param_dtype: jax.typing.DTypeLike) -> Params:
    params = nnx.to_pure_dict(nnx.state(_abstract_transformer(spec)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, param_dtype), params)
