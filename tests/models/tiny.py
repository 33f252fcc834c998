"""Tiny networks and packed rows for the tests of `jaxrl.models`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import Model, ModelSpec, build_model, init_params
from jaxrl.models.transformer import Params

TIED = ModelSpec(
    family="qwen3",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    is_tied=True,
    has_qk_norm=True,
    has_attention_bias=False,
    max_position_embeddings=64,
)
UNTIED = dataclasses.replace(TIED, is_tied=False)
BIASED = dataclasses.replace(TIED, has_attention_bias=True, has_qk_norm=False)


def tiny_model(spec: ModelSpec = TIED, seed: int = 0) -> tuple[Model, Params]:
    """A model whose weights are large enough for attention to matter and whose norm scales are not all one."""
    model = build_model(spec)
    leaves, tree = jax.tree.flatten(init_params(model, jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noisy = [leaf * 10 + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, noisy)


def pack_row(sequences: list[list[int]], length: int) -> dict[str, jnp.ndarray]:
    """One row [1, length] that holds the sequences one after another, then padding."""
    row = {name: np.zeros((1, length), np.int32) for name in ("token_ids_BT", "position_ids_BT", "segment_ids_BT")}
    start = 0
    for segment, sequence in enumerate(sequences, start=1):
        stop = start + len(sequence)
        row["token_ids_BT"][0, start:stop] = sequence
        row["position_ids_BT"][0, start:stop] = np.arange(len(sequence))
        row["segment_ids_BT"][0, start:stop] = segment
        start = stop
    return {name: jnp.asarray(array) for name, array in row.items()}


def stack_rows(*rows: dict[str, jnp.ndarray]) -> dict[str, jnp.ndarray]:
    """Rows of one length as one batch."""
    return {name: jnp.concatenate([row[name] for row in rows]) for name in rows[0]}
