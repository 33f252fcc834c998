import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import ModelLoadError
from jaxrl.models import build_mesh, load_pretrained, save_pretrained
from jaxrl.models.mesh import param_shardings
from tests.models.tiny import BIASED, TIED, UNTIED, tiny_model

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer"
GOLDEN = Path(__file__).parents[1] / "golden" / "models"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tied model's directory, written by us."""
    save_pretrained(*tiny_model(TIED), tmp_path / "model")
    return tmp_path / "model"


def edit_weights(directory: Path, **changes: np.ndarray | None) -> None:
    """Replace, add or (None) remove tensors; `__` in a keyword stands for a dot."""
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, directory / "model.safetensors")


def split_into_shards(directory: Path) -> None:
    """Turn the single weight file into two shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(2):
        part = {name: tensor for i, (name, tensor) in enumerate(sorted(tensors.items())) if i % 2 == shard}
        save_file(part, directory / f"model-0000{shard + 1}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-0000{shard + 1}-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_same_bytes(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), a, b)


@pytest.mark.parametrize("spec", [TIED, UNTIED, dataclasses.replace(BIASED, family="qwen2")], ids=["tied", "untied", "biased"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_saved_and_loaded_is_the_same_to_the_last_bit(tmp_path, spec, dtype):
    model, params = tiny_model(spec)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)
    save_pretrained(model, params, tmp_path / "a", dtype=dtype)
    loaded_model, loaded = load_pretrained(tmp_path / "a", param_dtype=dtype)
    assert loaded_model == model
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert_same_bytes(loaded, params)
    save_pretrained(loaded_model, loaded, tmp_path / "b", dtype=dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_untied", "llama", "qwen2"])
def test_a_directory_written_by_transformers_comes_back_byte_for_byte(tmp_path, kind):
    save_pretrained(*load_pretrained(GOLDEN / kind), tmp_path / "copy")
    theirs, ours = load_file(GOLDEN / kind / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].dtype == ours[name].dtype and theirs[name].tobytes() == ours[name].tobytes() for name in theirs)


def test_kernels_are_written_out_by_in_and_layers_apart(checkpoint):
    _, params = tiny_model(TIED)
    written = load_file(checkpoint / "model.safetensors")
    np.testing.assert_array_equal(written["model.layers.1.mlp.down_proj.weight"], params["layers"]["mlp"]["down_proj"]["kernel"][1].T)
    assert "lm_head.weight" not in written


def test_the_written_config_is_read_by_transformers(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.rope_parameters["rope_theta"] == TIED.rope_theta
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (8, 2, True)
    assert str(config.dtype).endswith("float32")


def test_weights_above_a_shards_size_are_split_over_files_with_an_index(tmp_path, checkpoint):
    _, params = tiny_model(TIED)
    whole = load_file(checkpoint / "model.safetensors")
    save_pretrained(*tiny_model(TIED), tmp_path / "split", max_shard_bytes=5000)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "split").glob("model-*.safetensors"))
    assert {file.name for file in shards} == set(index["weight_map"].values())
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in shards:
        part = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in part)
        assert all(tensor.tobytes() == whole[name].tobytes() for name, tensor in part.items())
        assert sum(tensor.nbytes for tensor in part.values()) <= 5000
    assert_same_bytes(load_pretrained(tmp_path / "split")[1], params)


def test_a_tensor_larger_than_a_shard_is_alone_in_its_file(tmp_path):
    save_pretrained(*tiny_model(TIED), tmp_path / "split", max_shard_bytes=1)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(index["weight_map"])
    assert_same_bytes(load_pretrained(tmp_path / "split")[1], tiny_model(TIED)[1])


def test_a_saved_model_crosses_to_the_host_one_tensor_at_a_time(tmp_path):
    """A leaf is stacked over layers; what is asked of it is a layer."""
    model, params = tiny_model(TIED)
    asked = []

    class Watched:
        """An array that tells which part of it was asked for, and cannot be had whole."""

        def __init__(self, array):
            self._array, self.shape, self.dtype = array, array.shape, array.dtype

        def __getitem__(self, index):
            asked.append(index)
            return self._array[index]

    save_pretrained(model, {**params, "layers": jax.tree.map(Watched, params["layers"])}, tmp_path / "model")
    assert_same_bytes(load_pretrained(tmp_path / "model")[1], params)
    assert sorted(set(asked)) == [0, 1]


def test_bfloat16_files_become_float32_masters_exactly_and_are_saved_rounded_to_even(tmp_path):
    model, params = tiny_model(TIED)
    # 1 + 2^-8 lies half-way between two bfloat16 numbers and rounds to the even 1; 1 + 3 * 2^-8 to the even 1 + 2^-6.
    params["final_norm"]["scale"][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8]
    save_pretrained(model, params, tmp_path / "half", dtype="bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype.name for tensor in stored.values()} == {"bfloat16"}
    _, masters = load_pretrained(tmp_path / "half")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}
    np.testing.assert_array_equal(masters["final_norm"]["scale"][:4], np.array([1, 1 + 2**-6, 1 + 2**-7, -1], np.float32))
    np.testing.assert_array_equal(masters["embed"]["weight"], stored["model.embed_tokens.weight"].astype(np.float32))
    save_pretrained(model, masters, tmp_path / "again", dtype="bfloat16")
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()


def test_shards_load_like_one_file(checkpoint):
    _, whole = load_pretrained(checkpoint)
    split_into_shards(checkpoint)
    _, sharded = load_pretrained(checkpoint)
    assert_same_bytes(whole, sharded)


@pytest.mark.parametrize("config", [MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2)], ids=["fsdp8", "2x2x2"])
def test_loading_onto_a_mesh_gives_the_same_numbers_in_their_places(checkpoint, config):
    mesh = build_mesh(config)
    _, whole = load_pretrained(checkpoint)
    model, split = load_pretrained(checkpoint, mesh=mesh)
    assert model.mesh == mesh
    assert_same_bytes(split, whole)
    assert jax.tree.map(lambda leaf: leaf.sharding, split) == param_shardings(mesh, split)


def test_parameters_take_the_asked_dtype_rounded_to_nearest(checkpoint):
    _, exact = load_pretrained(checkpoint)
    _, rounded = load_pretrained(checkpoint, param_dtype="bfloat16")
    assert_same_bytes(rounded, jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), exact))


def test_loaded_parameters_may_be_donated(checkpoint):
    _, params = load_pretrained(checkpoint)
    before = np.array(params["embed"]["weight"])
    after = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    assert params["embed"]["weight"].is_deleted()
    np.testing.assert_array_equal(after["embed"]["weight"], before + 1)


def test_a_tied_checkpoint_may_repeat_its_embedding_as_the_head(checkpoint):
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(checkpoint, lm_head__weight=embedding)
    _, params = load_pretrained(checkpoint)
    assert "lm_head" not in params
    edit_weights(checkpoint, lm_head__weight=embedding + 1e-3)
    with pytest.raises(ModelLoadError, match=r"`lm_head.weight` is not equal to `model.embed_tokens.weight`"):
        load_pretrained(checkpoint)


def test_a_name_that_is_neither_a_directory_nor_on_the_hub_is_refused():
    with pytest.raises(ModelLoadError, match=r"`/no/such/place` is not a directory.*`org/name`"):
        load_pretrained("/no/such/place")


def test_a_file_in_place_of_a_directory_is_refused(checkpoint):
    with pytest.raises(ModelLoadError, match="is a file"):
        load_pretrained(checkpoint / "model.safetensors")


def remove_config(directory):
    (directory / "config.json").unlink()


def break_config(directory):
    (directory / "config.json").write_text('{"model_type": ')


def list_config(directory):
    (directory / "config.json").write_text("[]")


def change_family(directory):
    (directory / "config.json").write_text('{"model_type": "llava"}')


def truncate_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5])


def corrupt_header(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"garbage!" + file.read_bytes()[16:])


def pickle_weights(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def lose_shard(directory):
    split_into_shards(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def break_index(directory):
    split_into_shards(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": []}')


def repeat_tensor(directory):
    split_into_shards(directory)
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors")


def lose_and_add_tensors(directory):
    edit_weights(
        directory,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__0__self_attn__q_proj__bias=np.zeros(32, np.float32),
        model__layers__2__mlp__up_proj__weight=np.zeros((32, 16), np.float32),
    )


def change_shape(directory):
    edit_weights(directory, model__layers__0__mlp__up_proj__weight=np.zeros((16, 32), np.float32))


def quantise(directory):
    edit_weights(directory, model__layers__0__mlp__up_proj__weight=np.zeros((32, 16), np.int8))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_config, ["has no config.json"]),
        (break_config, ["config.json", "JSON"]),
        (list_config, ["config.json", "list", "object"]),
        (change_family, ["'llava'", "'qwen3'"]),
        (truncate_weights, ["model.safetensors", "not a whole safetensors file"]),
        (cut_header, ["model.safetensors", "(5 bytes)"]),
        (corrupt_header, ["model.safetensors", "not a whole safetensors file"]),
        (pickle_weights, ["pytorch_model.bin", "Only safetensors are read"]),
        (lose_shard, ["1 of 2 shards", "model-00002-of-00002.safetensors"]),
        (break_index, ["weight_map"]),
        (repeat_tensor, ["another shard"]),
        (
            lose_and_add_tensors,
            [
                "missing from the files: model.layers.1.mlp.up_proj.weight, model.norm.weight;",
                "not part of the model: model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight.",
            ],
        ),
        (change_shape, ["model.layers.0.mlp.up_proj.weight is [16, 32], expected [32, 16]"]),
        (quantise, ["model.layers.0.mlp.up_proj.weight is I8"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_directory_is_refused_in_one_paragraph_that_names_what_is_wrong(checkpoint, damage, named):
    damage(checkpoint)
    with pytest.raises(ModelLoadError) as caught:
        load_pretrained(checkpoint)
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert "\n" not in message
    assert message.endswith(".")


def test_an_untied_config_over_tied_weights_names_the_missing_head(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelLoadError, match=r"`tie_word_embeddings`=False\); missing from the files: lm_head.weight\."):
        load_pretrained(checkpoint)


def test_the_tokenizer_travels_with_the_weights(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(TOKENIZER, source)
    (source / "config.json").write_text('{"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": null, "hidden_size": 1}')
    save_pretrained(*tiny_model(TIED), tmp_path / "model", tokenizer_dir=source)
    for file in TOKENIZER.iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["hidden_size"]) == (2, 0, TIED.hidden_size)
    assert "bos_token_id" not in config


def test_a_directory_in_use_is_not_touched(checkpoint):
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    with pytest.raises(ModelLoadError, match="not an empty directory"):
        save_pretrained(*tiny_model(TIED, seed=9), checkpoint)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="none of the tokenizer files"):
        save_pretrained(*tiny_model(TIED), tmp_path / "model", tokenizer_dir=tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_an_empty_directory_may_be_saved_into(tmp_path):
    (tmp_path / "model").mkdir()
    save_pretrained(*tiny_model(TIED), tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_what_older_checkpoints_hold_of_the_rotary_embedding_is_not_read(checkpoint):
    _, params = load_pretrained(checkpoint)
    edit_weights(checkpoint, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    assert_same_bytes(load_pretrained(checkpoint)[1], params)


def test_a_config_of_another_size_is_refused_in_a_few_lines(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 80}))
    with pytest.raises(ModelLoadError, match=r"missing from the files: model.layers.10.input_layernorm.weight.*and 850 more\.") as caught:
        load_pretrained(checkpoint)
    assert len(str(caught.value)) < 1000


def test_a_link_to_a_file_that_is_gone_is_told_as_one(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("gone")
    with pytest.raises(ModelLoadError, match=r"model.safetensors \(a link to nothing\)"):
        load_pretrained(checkpoint)


def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance_nor_is_a_link(tmp_path):
    left = tmp_path / f".model.partial-{os.getpid()}"
    left.mkdir()
    (left / "half").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    save_pretrained(*tiny_model(TIED), tmp_path / "link")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}
    assert not left.exists()
