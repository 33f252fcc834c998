"""What sets one model family apart from another: its Hugging Face names, its defaults and its switches.

A family is data, not code: the decoder in `transformer` is shared, and `spec` reads a `Family` to turn a config.json
into a `ModelSpec`. To add one, write a module like `qwen3` and list it in `spec.FAMILIES`; no other file changes. This
module reads no file and touches no array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LAYER = "{layer}"
"""Stands for the layer's number in the Hugging Face name of a tensor that we keep stacked over layers."""


@dataclass(frozen=True)
class NameRule:
    """One tensor under its two names; used in both directions, for loading and for saving."""

    hf: str
    """Hugging Face name; holds `{layer}` when ours is stacked over layers."""
    path: str
    """Our path in the parameter dict, joined by `/`."""
    transform: Literal["same", "transpose"] = "same"
    """`transpose`: theirs is [out, in], ours is [in, out]."""


@dataclass(frozen=True)
class Family:
    """One decoder family as Hugging Face publishes it."""

    name: str
    """`model_type` of config.json."""
    architecture: str
    """Entry of `architectures` in config.json."""
    has_qk_norm: bool
    """Queries and keys are normalised per head before the rotary embedding."""
    has_attention_bias: bool
    """The query, key and value projections add a bias."""
    config_defaults: Mapping[str, Any]
    """Value that a key absent from config.json stands for. An absent `head_dim` without one means `hidden_size /
    num_attention_heads`, an absent `num_key_value_heads` as many as query heads."""
    fixed_config: Mapping[str, Any]
    """Keys that change the network in ways this package does not build, with the only value it accepts (absent is
    accepted)."""
    names: tuple[NameRule, ...]
    """Every tensor that a checkpoint of the family may hold; the parameter tree of a model decides which of them it
    does hold."""


DECODER_NAMES = (
    NameRule("model.embed_tokens.weight", "embed/weight"),
    NameRule("model.layers.{layer}.input_layernorm.weight", "layers/input_norm/scale"),
    NameRule("model.layers.{layer}.self_attn.q_proj.weight", "layers/attention/q_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.self_attn.k_proj.weight", "layers/attention/k_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.self_attn.v_proj.weight", "layers/attention/v_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.self_attn.o_proj.weight", "layers/attention/o_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.post_attention_layernorm.weight", "layers/post_attention_norm/scale"),
    NameRule("model.layers.{layer}.mlp.gate_proj.weight", "layers/mlp/gate_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.mlp.up_proj.weight", "layers/mlp/up_proj/kernel", "transpose"),
    NameRule("model.layers.{layer}.mlp.down_proj.weight", "layers/mlp/down_proj/kernel", "transpose"),
    NameRule("model.norm.weight", "final_norm/scale"),
    NameRule("lm_head.weight", "lm_head/weight"),
)
"""Names shared by the pre-norm decoders with rotary positions and a gated feed-forward (Llama, Qwen2, Qwen3)."""
