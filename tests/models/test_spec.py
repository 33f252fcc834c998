import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from jaxrl.errors import ModelLoadError
from jaxrl.models import ModelSpec
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


@pytest.mark.parametrize("case", FLOPS_CASES, ids=lambda case: case["model"])
def test_flops_per_token_match_the_published_figures(case):
    spec = {"Qwen3-0.6B": ModelSpec.from_hf(QWEN3_0_6B)}[case["model"]]
    assert spec.num_active_matmul_params == case["active_matmul_params"]
    assert spec.flops_per_token(case["seq_len"]) == case["flops_per_token"]


def test_parameters_of_qwen3_0_6b_count_to_the_published_number():
    assert ModelSpec.from_hf(QWEN3_0_6B).num_params == 596_049_920


def test_an_untied_head_is_counted_once_more():
    assert UNTIED.num_params - TIED.num_params == TIED.vocab_size * TIED.hidden_size


def test_the_rope_base_is_read_in_the_spelling_of_transformers_4_and_5():
    old = ModelSpec.from_hf({**QWEN3_0_6B, "rope_scaling": None})
    new = ModelSpec.from_hf({**QWEN3_0_6B, "rope_theta": None, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}})
    assert old == new
    assert old.rope_theta == 1e6


def test_keys_absent_from_config_json_mean_what_transformers_takes_them_for():
    sizes = {key: QWEN3_0_6B[key] for key in QWEN3_0_6B if key not in ("head_dim", "rope_theta", "tie_word_embeddings")}
    spec, theirs = ModelSpec.from_hf(sizes), Qwen3Config(**sizes)
    assert spec.head_dim == theirs.head_dim
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.is_tied == theirs.tie_word_embeddings


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


def test_an_unknown_family_is_refused_naming_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"'mamba'.*'qwen3'"):
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
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_part_that_is_not_built_is_refused_by_name(extra, named):
    with pytest.raises(ModelLoadError, match=named):
        ModelSpec.from_hf({**QWEN3_0_6B, **extra})
