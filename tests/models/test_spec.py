import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from jaxrl.errors import ModelLoadError
from jaxrl.models import ModelSpec
from jaxrl.models.spec import RopeScaling
from tests.models.tiny import TIED, UNTIED

FLOPS_CASES = json.loads((Path(__file__).parents[1] / "golden" / "models" / "flops_cases.json").read_text())

QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}

LLAMA_3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "use_mrope": False,
}


def sizes_of(config: dict, hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocab: int, *, is_tied: bool) -> dict:
    """Another published model of the same family; its head size is `hidden / heads`."""
    sizes = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "head_dim": hidden // heads, "vocab_size": vocab, "tie_word_embeddings": is_tied}
    return config | sizes


@pytest.mark.parametrize("case", FLOPS_CASES, ids=lambda case: case["model"])
def test_flops_per_token_match_the_published_figures(case):
    spec = {"Qwen3-0.6B": ModelSpec.from_hf(QWEN3_0_6B)}[case["model"]]
    assert spec.num_active_matmul_params == case["active_matmul_params"]
    assert spec.flops_per_token(case["seq_len"]) == case["flops_per_token"]


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (QWEN3_0_6B, 596_049_920),
        (LLAMA_3_2_1B, 1_235_814_400),
        (QWEN2_5_0_5B, 494_032_768),
        (sizes_of(QWEN3_0_6B, 4096, 12288, 36, 32, 8, 151936, is_tied=False), 8_190_735_360),  # Qwen3-8B
        (sizes_of(QWEN2_5_0_5B, 3584, 18944, 28, 28, 4, 152064, is_tied=False), 7_615_616_512),  # Qwen2-7B, Qwen2.5-7B
        (sizes_of(LLAMA_3_2_1B, 4096, 14336, 32, 32, 8, 128256, is_tied=False), 8_030_261_248),  # Llama-3.1-8B
        (sizes_of(LLAMA_3_2_1B, 2048, 5632, 22, 32, 4, 32000, is_tied=False), 1_100_048_384),  # TinyLlama-1.1B
        (sizes_of(LLAMA_3_2_1B, 576, 1536, 30, 9, 3, 49152, is_tied=True), 134_515_008),  # SmolLM2-135M
    ],
    ids=lambda value: "",
)
def test_parameters_of_published_models_count_to_the_published_numbers(config, num_params):
    assert ModelSpec.from_hf(config).num_params == num_params


def test_an_untied_head_is_counted_once_more():
    assert UNTIED.num_params - TIED.num_params == TIED.vocab_size * TIED.hidden_size


def test_the_rope_base_is_read_in_the_spelling_of_transformers_4_and_5():
    old = ModelSpec.from_hf({**QWEN3_0_6B, "rope_scaling": None})
    new = ModelSpec.from_hf({**QWEN3_0_6B, "rope_theta": None, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}})
    assert old == new
    assert old.rope_theta == 1e6


def test_llama_3s_scaling_is_read_in_the_spelling_of_transformers_4_and_5():
    old = ModelSpec.from_hf({**LLAMA_3_2_1B, "rope_scaling": LLAMA3_ROPE})
    older = ModelSpec.from_hf({**LLAMA_3_2_1B, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}})
    new = ModelSpec.from_hf({**LLAMA_3_2_1B, "rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert old == older == new
    assert new.rope_theta == 500000.0
    assert new.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("change", [{"factor": None}, {"low_freq_factor": "1"}, {"high_freq_factor": 1.0}, {"factor": 0.5}], ids=str)
def test_a_scaling_that_cannot_be_is_refused_by_name(change):
    with pytest.raises(ModelLoadError, match=rf"`rope_scaling`.*`{next(iter(change))}`"):
        ModelSpec.from_hf({**LLAMA_3_2_1B, "rope_scaling": {**LLAMA3_ROPE, **change}})


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(ModelLoadError, match="disagree"):
        ModelSpec.from_hf({**LLAMA_3_2_1B, "rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("config", "theirs"), [(LLAMA_3_2_1B, LlamaConfig), (QWEN2_5_0_5B, Qwen2Config), (QWEN3_0_6B, Qwen3Config)], ids=lambda value: ""
)
def test_keys_absent_from_config_json_mean_what_transformers_takes_them_for(config, theirs):
    given = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: config[key] for key in given} | {"num_attention_heads": 32, "hidden_size": 2048}
    spec, theirs = ModelSpec.from_hf(sizes), theirs(**sizes)
    assert spec.head_dim == getattr(theirs, "head_dim", 2048 // 32)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.is_tied == theirs.tie_word_embeddings
    assert spec.max_position_embeddings == theirs.max_position_embeddings


@given(layers=st.integers(1, 5), kv_heads=st.integers(1, 4), group=st.integers(1, 4), half_head=st.integers(1, 64), tied=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_spec_survives_the_way_through_config_json_and_transformers(layers, kv_heads, group, half_head, tied):
    spec = ModelSpec.from_hf(
        {
            **QWEN3_0_6B,
            "num_hidden_layers": layers,
            "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads,
            "head_dim": 2 * half_head,
            "tie_word_embeddings": tied,
        }
    )
    written = json.loads(json.dumps(spec.to_hf("bfloat16")))
    assert ModelSpec.from_hf(written) == spec
    assert ModelSpec.from_hf(Qwen3Config.from_dict(written).to_dict()) == spec


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 8192)], ids=["plain", "llama3"])
@pytest.mark.parametrize(
    ("config", "theirs"), [(LLAMA_3_2_1B, LlamaConfig), (QWEN2_5_0_5B, Qwen2Config), (QWEN3_0_6B, Qwen3Config)], ids=lambda value: ""
)
def test_a_spec_of_every_family_survives_the_way_through_transformers(config, theirs, scaling):
    spec = dataclasses.replace(ModelSpec.from_hf(config), rope_scaling=scaling)
    written = json.loads(json.dumps(spec.to_hf("bfloat16")))
    assert ModelSpec.from_hf(written) == spec
    assert ModelSpec.from_hf(theirs.from_dict(written).to_dict()) == spec
    assert ("rope_scaling" in written) == (scaling is not None)


def test_an_unknown_family_is_refused_naming_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"'mamba'.*'llama', 'qwen2', 'qwen3'"):
        ModelSpec.from_hf({**QWEN3_0_6B, "model_type": "mamba"})
    with pytest.raises(ModelLoadError, match="None"):
        ModelSpec.from_hf({})


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3"])
def test_a_vision_language_model_is_refused_as_one(model_type):
    with pytest.raises(ModelLoadError, match=rf"'{model_type}' is a vision-language model.*only text"):
        ModelSpec.from_hf({**QWEN3_0_6B, "model_type": model_type, "vision_config": {"depth": 32}})


@pytest.mark.parametrize("value", [None, 0, -1, "28", 2.0, True])
def test_a_missing_or_impossible_size_is_refused_by_name(value):
    with pytest.raises(ModelLoadError, match="`num_hidden_layers`"):
        ModelSpec.from_hf({**QWEN3_0_6B, "num_hidden_layers": value})


@pytest.mark.parametrize("sizes", [{"num_key_value_heads": 3}, {"head_dim": 7}])
def test_heads_that_do_not_divide_are_refused(sizes):
    with pytest.raises(ModelLoadError, match="`num_key_value_heads`"):
        ModelSpec.from_hf({**QWEN3_0_6B, **sizes})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1.0}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_part_that_is_not_built_is_refused_by_name(extra, named):
    with pytest.raises(ModelLoadError, match=named):
        ModelSpec.from_hf({**QWEN3_0_6B, **extra})


@pytest.mark.parametrize("extra", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_biases_that_no_published_llama_has_are_refused_by_name(extra):
    with pytest.raises(ModelLoadError, match=next(iter(extra))):
        ModelSpec.from_hf({**LLAMA_3_2_1B, **extra})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": "1e6"},
        {"rope_theta": -1.0},
        {"rope_theta": True},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "false"},
        {"rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"layer_types": 5},
        {"model_type": ["qwen3"]},
    ],
    ids=str,
)
def test_a_value_that_is_not_of_its_kind_is_refused_by_name(change):
    named = "rope_theta" if "rope_theta" in str(change) else next(iter(change))
    with pytest.raises(ModelLoadError, match=f"`{named}`"):
        ModelSpec.from_hf({**QWEN3_0_6B, **change})
