"""Tiny networks and packed rows for the tests of `jaxrl.models`; numpy arrays, so that building them compiles nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import Model, ModelSpec, build_model
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

Rows = dict[str, np.ndarray]
NUM_ROWS, LENGTH = 8, 16
"""The one shape that the tests run, so that each program compiles once."""


def tiny_model(spec: ModelSpec = TIED, seed: int = 0) -> tuple[Model, Params]:
    """A model whose weights are large enough for attention to matter and whose norm scales are not all one."""
    model = build_model(spec)
    rng = np.random.default_rng(seed)

    def draw(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(mean, 0.2, leaf.shape).astype(leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, model.abstract_params(jnp.float32))


def pack_rows(*rows: list[list[int]]) -> Rows:
    """[NUM_ROWS, LENGTH] rows, each holding its sequences one after another, then padding; rows not given are all padding."""
    names = ("token_ids_BT", "position_ids_BT", "segment_ids_BT")
    arrays = {name: np.zeros((NUM_ROWS, LENGTH), np.int32) for name in names}
    for row, sequences in enumerate(rows):
        start = 0
        for segment, sequence in enumerate(sequences, start=1):
            stop = start + len(sequence)
            arrays["token_ids_BT"][row, start:stop] = sequence
            arrays["position_ids_BT"][row, start:stop] = np.arange(len(sequence))
            arrays["segment_ids_BT"][row, start:stop] = segment
            start = stop
    return arrays
