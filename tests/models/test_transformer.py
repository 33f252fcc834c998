import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.models import build_mesh, build_model, init_params
from jaxrl.models.mesh import batch_sharding, param_shardings
from tests.models.tiny import BIASED, LENGTH, NUM_ROWS, TIED, UNTIED, pack_rows, tiny_model

SEQUENCES = [[5, 9, 1, 30, 22], [7, 7, 2], [41, 0, 13, 8]]
MESHES = {"data8": MeshConfig(data=8), "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2)}


@partial(jax.jit, static_argnums=(0, 3, 4))
def run_jitted(model, params, rows, compute_dtype, remat):
    def loss(params):
        states = model.hidden(params, **rows, compute_dtype=compute_dtype, remat=remat)
        weights = jnp.sin(jnp.arange(states.shape[-1], dtype=jnp.float32))
        is_real = rows["segment_ids_BT"][..., None] != 0
        return jnp.sum(jnp.where(is_real, jnp.tanh(states.astype(jnp.float32)) * weights[None, None], 0.0)), states

    (value, states), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return states, value, grads


def run(model, params, rows, compute_dtype="float32", remat="none"):
    """Hidden states, a loss over the real tokens that weighs every dimension differently, and its gradient, on the host."""
    return jax.device_get(run_jitted(model, params, rows, compute_dtype, remat))


def assert_trees_close(a, b, tolerance=1e-5):
    """Every leaf within `tolerance` of its largest entry."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max()), a, b)


def all_finite(tree):
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("spec", [TIED, UNTIED, BIASED], ids=["tied", "untied", "biased"])
def test_the_parameter_tree_is_the_documented_one_and_counts_to_num_params(spec):
    params = build_model(spec).abstract_params(jnp.bfloat16)
    shapes = {"/".join(k.key for k in path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    expected = {
        "embed/weight": (48, 16),
        "final_norm/scale": (16,),
        "layers/input_norm/scale": (2, 16),
        "layers/post_attention_norm/scale": (2, 16),
        "layers/attention/q_proj/kernel": (2, 16, 32),
        "layers/attention/k_proj/kernel": (2, 16, 16),
        "layers/attention/v_proj/kernel": (2, 16, 16),
        "layers/attention/o_proj/kernel": (2, 32, 16),
        "layers/mlp/gate_proj/kernel": (2, 16, 32),
        "layers/mlp/up_proj/kernel": (2, 16, 32),
        "layers/mlp/down_proj/kernel": (2, 32, 16),
    }
    if spec.has_qk_norm:
        expected |= {"layers/attention/q_norm/scale": (2, 8), "layers/attention/k_norm/scale": (2, 8)}
    if spec.has_attention_bias:
        expected |= {f"layers/attention/{name}_proj/bias": (2, width) for name, width in (("q", 32), ("k", 16), ("v", 16))}
    if not spec.is_tied:
        expected["lm_head/weight"] = (48, 16)
    assert shapes == expected
    assert sum(x.size for x in jax.tree.leaves(params)) == spec.num_params


def test_fresh_weights_have_the_documented_spread_and_layers_differ():
    params = jax.device_get(init_params(build_model(UNTIED), jax.random.key(3), jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert 0.018 < params["embed"]["weight"].astype(np.float32).std() < 0.022
    kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])
    np.testing.assert_array_equal(params["final_norm"]["scale"], 1.0)


def test_the_head_is_the_embedding_itself_when_tied():
    model, params = tiny_model(TIED)
    assert model.head(params) is params["embed"]["weight"]
    model, params = tiny_model(UNTIED)
    assert model.head(params) is params["lm_head"]["weight"]


def test_equal_specs_give_equal_models_so_that_jit_compiles_once():
    assert build_model(TIED) == build_model(TIED)
    assert hash(build_model(TIED)) == hash(build_model(TIED))
    assert build_model(TIED) != build_model(UNTIED)


def test_op_by_op_the_states_are_those_of_the_compiled_function():
    model, params = tiny_model()
    rows = pack_rows(SEQUENCES)
    np.testing.assert_allclose(model.hidden(params, **rows), run(model, params, rows)[0], rtol=0, atol=1e-5)


def test_layers_that_add_nothing_leave_the_normed_embedding():
    model, params = tiny_model()
    for part, name in (("attention", "o_proj"), ("mlp", "down_proj")):
        params["layers"][part][name]["kernel"][...] = 0.0
    states, _, _ = run(model, params, pack_rows([[3, 4, 5]]))
    x = params["embed"]["weight"][[3, 4, 5]]
    expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * params["final_norm"]["scale"]
    np.testing.assert_allclose(states[0, :3], expected, rtol=1e-5)


@pytest.mark.parametrize("spec", [TIED, BIASED], ids=["tied", "biased"])
@given(lengths=st.lists(st.integers(1, 5), min_size=3, max_size=3), seed=st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_a_packed_row_equals_its_sequences_alone_in_states_and_gradients(spec, lengths, seed):
    model, params = tiny_model(spec)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]
    packed, _, packed_grads = run(model, params, pack_rows(sequences))
    alone, _, alone_grads = run(model, params, pack_rows(*([sequence] for sequence in sequences)))
    start = 0
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(packed[0, start : start + length], alone[row, :length], atol=1e-5)
        start += length
    assert_trees_close(packed_grads, alone_grads)


def test_garbage_in_padding_changes_no_state_and_no_gradient_and_padding_is_zeros():
    model, params = tiny_model()
    params["embed"]["weight"][47] = np.nan
    rows = pack_rows(SEQUENCES, SEQUENCES[:1])
    is_padding = rows["segment_ids_BT"] == 0
    clean = run(model, params, rows)
    np.testing.assert_array_equal(clean[0][is_padding], 0.0)
    assert all_finite(clean)
    for token, position in ((47, 0), (10**6, 10**6), (-5, -3)):
        garbage = {
            "token_ids_BT": np.where(is_padding, token, rows["token_ids_BT"]),
            "position_ids_BT": np.where(is_padding, position, rows["position_ids_BT"]),
            "segment_ids_BT": rows["segment_ids_BT"],
        }
        jax.tree.map(np.testing.assert_array_equal, run(model, params, garbage), clean)


def test_a_broken_token_stays_inside_its_segment_and_is_not_hidden_there():
    model, params = tiny_model()
    rows = pack_rows(SEQUENCES)
    clean, _, _ = run(model, params, rows)
    params["embed"]["weight"][SEQUENCES[1][2]] = np.nan
    states, loss, _ = run(model, params, rows)
    is_broken = np.zeros((NUM_ROWS, LENGTH), bool)
    is_broken[0, 7] = True
    np.testing.assert_array_equal(states[~is_broken], clean[~is_broken])
    assert np.isnan(states[is_broken]).all()
    assert np.isnan(loss)


def test_a_token_changes_only_itself_and_what_follows_in_its_segment():
    model, params = tiny_model()
    before, _, _ = run(model, params, pack_rows(SEQUENCES))
    after, _, _ = run(model, params, pack_rows([[5, 9, 2, 30, 22], *SEQUENCES[1:]]))
    changed = np.abs(after - before).max(axis=-1) > 1e-4
    assert np.argwhere(changed).tolist() == [[0, 2], [0, 3], [0, 4]]


def test_recomputing_layers_changes_neither_value_nor_gradient():
    model, params = tiny_model()
    rows = pack_rows(SEQUENCES)
    assert_trees_close(run(model, params, rows, remat="layer"), run(model, params, rows))


def test_an_unknown_remat_is_refused():
    model, params = tiny_model()
    with pytest.raises(AssertionError, match="remat"):
        model.hidden(params, **pack_rows(SEQUENCES), remat=True)


def test_bfloat16_compute_stays_close_to_float32_and_gives_gradients_in_the_parameters_precision():
    model, params = tiny_model()
    rows = pack_rows(SEQUENCES)
    states, _, grads = run(model, params, rows, "bfloat16")
    exact, _, exact_grads = run(model, params, rows)
    assert states.dtype == jnp.dtype("bfloat16")
    assert 1e-4 < np.abs(states.astype(np.float32) - exact).max() < 0.1
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    assert_trees_close(grads, exact_grads, tolerance=0.05)


@pytest.mark.parametrize("config", MESHES.values(), ids=MESHES.keys())
def test_sharded_values_and_gradients_equal_those_of_one_device(config):
    model, params = tiny_model()
    rows = pack_rows(*(SEQUENCES[i % 3 :] for i in range(NUM_ROWS)))
    mesh = build_mesh(config)
    split_params = jax.device_put(params, param_shardings(mesh, params))
    split_rows = jax.device_put(rows, batch_sharding(mesh))
    assert_trees_close(run(build_model(TIED, mesh), split_params, split_rows), run(model, params, rows))


def test_fresh_parameters_are_the_same_numbers_on_any_mesh_and_already_sharded():
    mesh = build_mesh(MESHES["2x2x2"])
    split = init_params(build_model(TIED, mesh), jax.random.key(0))
    assert_trees_close(jax.device_get(split), jax.device_get(init_params(build_model(TIED), jax.random.key(0))), 1e-6)
    assert split["embed"]["weight"].addressable_shards[0].data.shape == (24, 8)
    assert split["layers"]["mlp"]["down_proj"]["kernel"].addressable_shards[0].data.shape == (2, 16, 8)


def test_between_devices_weights_are_gathered_and_sums_reduced_but_no_activation_is_exchanged():
    mesh = build_mesh(MESHES["2x2x2"])
    model, params = build_model(TIED, mesh), tiny_model()[1]
    split_params = jax.device_put(params, param_shardings(mesh, params))
    rows = jax.device_put(pack_rows(*[SEQUENCES] * NUM_ROWS), batch_sharding(mesh))
    program = run_jitted.lower(model, split_params, rows, "float32", "none").compile().as_text()
    kinds = re.findall(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    assert set(kinds) == {"all-gather", "all-reduce"}


def test_rows_that_the_mesh_does_not_divide_are_refused():
    model, params = build_model(TIED, build_mesh(MESHES["data8"])), tiny_model()[1]
    three_rows = {name: array[:3] for name, array in pack_rows(SEQUENCES).items()}
    with pytest.raises(ConfigError, match=r"rows .*size 3.*`trainer.mesh.data`=8"):
        jax.eval_shape(lambda rows: model.hidden(params, **rows), three_rows)
