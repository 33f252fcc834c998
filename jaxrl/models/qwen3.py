"""Qwen3 (dense): a pre-norm decoder with grouped queries and a norm on every query and key head, tied or untied.

Holds the family's names and defaults, nothing that runs. Mixture-of-experts Qwen3 is another family (`qwen3_moe`) and
is not described here.

Reference: Yang et al. 2025, Qwen3 Technical Report, https://arxiv.org/abs/2505.09388, section 2.
"""

from __future__ import annotations

from jaxrl.models.family import DECODER_NAMES, Family, NameRule

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    has_qk_norm=True,
    has_attention_bias=False,
    config_defaults={
        "head_dim": 128,
        "num_key_value_heads": 32,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    fixed_config={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    names=(
        *DECODER_NAMES,
        NameRule("model.layers.{layer}.self_attn.q_norm.weight", "layers/attention/q_norm/scale"),
        NameRule("model.layers.{layer}.self_attn.k_norm.weight", "layers/attention/k_norm/scale"),
    ),
)
