"""Llama: a pre-norm decoder with grouped queries and no biases, tied or untied (Llama 2 and 3, SmolLM2).

Holds the family's names and defaults, nothing that runs. Llama 3's stretched rotary wavelengths are `spec.RopeScaling`,
and every family may ask for them.

Reference: Grattafiori et al. 2024, The Llama 3 Herd of Models, https://arxiv.org/abs/2407.21783, section 3.2.
"""

from __future__ import annotations

from jaxrl.models.family import DECODER_NAMES, Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    has_qk_norm=False,
    has_attention_bias=False,
    config_defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
    # `attention_bias` would add a bias to the output projection as well, which no published checkpoint of size has.
    fixed_config={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    names=DECODER_NAMES,
)
