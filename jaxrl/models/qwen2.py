"""Qwen2 and Qwen2.5 (dense): a pre-norm decoder with grouped queries whose query, key and value projections add a bias.

Holds the family's names and defaults, nothing that runs. Their config.json describes a sliding window
(`sliding_window`, `max_window_layers`) also where `use_sliding_window` is false; those keys then mean nothing.

Reference: Yang et al. 2024, Qwen2 Technical Report, https://arxiv.org/abs/2407.10671, section 2.2.1.
"""

from __future__ import annotations

from jaxrl.models.family import DECODER_NAMES, Family, NameRule

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    has_qk_norm=False,
    has_attention_bias=True,
    config_defaults={
        "num_key_value_heads": 32,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    fixed_config={"hidden_act": "silu", "use_sliding_window": False},
    names=(
        *DECODER_NAMES,
        NameRule("model.layers.{layer}.self_attn.q_proj.bias", "layers/attention/q_proj/bias"),
        NameRule("model.layers.{layer}.self_attn.k_proj.bias", "layers/attention/k_proj/bias"),
        NameRule("model.layers.{layer}.self_attn.v_proj.bias", "layers/attention/v_proj/bias"),
    ),
)
