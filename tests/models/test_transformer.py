import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.models import build_mesh, build_model, init_params
from jaxrl.models.layers import rms_norm
from jaxrl.models.mesh import batch_sharding, param_shardings
from tests.models.tiny import BIASED, TIED, UNTIED, pack_row, stack_rows, tiny_model

LENGTH = 16
SEQUENCES = [[5, 9, 1, 30, 22], [7, 7, 2], [41, 0, 13, 8]]

run = jax.jit(
    lambda model, params, rows, dtype, remat: model.hidden(params, **rows, compute_dtype=dtype, remat=remat), static_argnums=(0, 3, 4)
)


def hidden(model, params, rows, dtype="float32", remat="none"):
    return run(model, params, rows, dtype, remat)


def probe_loss(model, params, rows, remat="none"):
    """A loss that weighs every dimension of every real position differently."""
    states = model.hidden(params, **rows, remat=remat)
    weights = jnp.sin(jnp.arange(states.size, dtype=jnp.float32)).reshape(states.shape)
    return jnp.sum(jnp.where(rows["segment_ids_BT"][..., None] != 0, states * weights, 0.0))


probe_grad = jax.jit(jax.value_and_grad(probe_loss, argnums=1), static_argnums=(0, 3))


@pytest.mark.parametrize("spec", [TIED, UNTIED, BIASED], ids=["tied", "untied", "biased"])
def test_the_parameter_tree_is_the_documented_one_and_counts_to_num_params(spec):
    params = init_params(build_model(spec), jax.random.key(0), jnp.bfloat16)
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
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


def test_fresh_weights_have_the_documented_spread_and_layers_differ():
    params = init_params(build_model(UNTIED), jax.random.key(3))
    assert 0.018 < float(params["embed"]["weight"].std()) < 0.022
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


def test_layers_that_add_nothing_leave_the_normed_embedding():
    model, params = tiny_model()
    for part, name in (("attention", "o_proj"), ("mlp", "down_proj")):
        params["layers"][part][name]["kernel"] = jnp.zeros_like(params["layers"][part][name]["kernel"])
    row = pack_row([[3, 4, 5]], 3)
    expected = rms_norm(params["embed"]["weight"][jnp.array([3, 4, 5])], params["final_norm"]["scale"], 1e-6)
    np.testing.assert_allclose(hidden(model, params, row)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("spec", [TIED, BIASED], ids=["tied", "biased"])
@given(lengths=st.lists(st.integers(1, 5), min_size=3, max_size=3), seed=st.integers(0, 5))
@settings(max_examples=6, deadline=None)
def test_a_packed_row_equals_its_sequences_alone(spec, lengths, seed):
    model, params = tiny_model(spec)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]
    packed = hidden(model, params, pack_row(sequences, LENGTH))[0]
    start = 0
    for sequence in sequences:
        alone = hidden(model, params, pack_row([sequence], LENGTH))[0, : len(sequence)]
        np.testing.assert_allclose(packed[start : start + len(sequence)], alone, atol=1e-5)
        start += len(sequence)


def test_packing_changes_no_gradient():
    model, params = tiny_model()

    def total(params, rows):
        return jnp.sum(jnp.where(rows["segment_ids_BT"][..., None] != 0, jnp.sin(model.hidden(params, **rows)), 0.0))

    packed = jax.grad(total)(params, pack_row(SEQUENCES, LENGTH))
    alone = jax.grad(total)(params, stack_rows(*(pack_row([sequence], LENGTH) for sequence in SEQUENCES)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), packed, alone)


def test_garbage_in_padding_changes_no_state_and_no_gradient_and_padding_is_zeros():
    model, params = tiny_model()
    params["embed"]["weight"] = params["embed"]["weight"].at[47].set(jnp.nan)
    row = pack_row(SEQUENCES, LENGTH)
    is_padding = row["segment_ids_BT"] == 0
    clean_states, (clean_loss, clean_grads) = hidden(model, params, row), probe_grad(model, params, row, "none")
    np.testing.assert_array_equal(clean_states[is_padding], 0.0)
    for token, position in ((47, 0), (10**6, 10**6), (-5, -3)):
        garbage = {
            "token_ids_BT": jnp.where(is_padding, token, row["token_ids_BT"]),
            "position_ids_BT": jnp.where(is_padding, position, row["position_ids_BT"]),
            "segment_ids_BT": row["segment_ids_BT"],
        }
        np.testing.assert_array_equal(hidden(model, params, garbage), clean_states)
        loss, grads = probe_grad(model, params, garbage, "none")
        assert np.isfinite(loss) and loss == clean_loss
        jax.tree.map(np.testing.assert_array_equal, grads, clean_grads)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean_grads))


def test_a_row_of_nothing_but_padding_is_zeros_with_finite_gradients():
    model, params = tiny_model()
    rows = stack_rows(pack_row(SEQUENCES, LENGTH), pack_row([], LENGTH))
    np.testing.assert_array_equal(hidden(model, params, rows)[1], 0.0)
    grads = jax.grad(lambda params: jnp.sum(model.hidden(params, **rows)))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_broken_token_stays_inside_its_segment():
    model, params = tiny_model()
    broken = dict(params, embed={"weight": params["embed"]["weight"].at[SEQUENCES[1][1]].set(jnp.nan)})
    row = pack_row(SEQUENCES, LENGTH)
    clean, states = hidden(model, params, row)[0], hidden(model, broken, row)[0]
    np.testing.assert_array_equal(states[:5], clean[:5])
    np.testing.assert_array_equal(states[8:], clean[8:])
    assert np.isnan(states[5:8]).all()


def test_a_token_changes_only_itself_and_what_follows_in_its_segment():
    model, params = tiny_model()
    before = hidden(model, params, pack_row(SEQUENCES, LENGTH))[0]
    after = hidden(model, params, pack_row([[5, 9, 2, 30, 22], *SEQUENCES[1:]], LENGTH))[0]
    changed = np.abs(after - before).max(axis=-1) > 1e-4
    np.testing.assert_array_equal(np.flatnonzero(changed), [2, 3, 4])


def test_recomputing_layers_changes_neither_value_nor_gradient():
    model, params = tiny_model()
    row = pack_row(SEQUENCES, LENGTH)
    kept, recomputed = probe_grad(model, params, row, "none"), probe_grad(model, params, row, "layer")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), kept, recomputed)


def test_an_unknown_remat_is_refused():
    model, params = tiny_model()
    with pytest.raises(AssertionError, match="remat"):
        model.hidden(params, **pack_row(SEQUENCES, LENGTH), remat=True)


def test_jit_equals_eager():
    model, params = tiny_model()
    row = pack_row(SEQUENCES, LENGTH)
    np.testing.assert_allclose(hidden(model, params, row), model.hidden(params, **row), atol=1e-5)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16_compute_stays_close_to_float32(param_dtype):
    model, params = tiny_model()
    params = jax.tree.map(lambda leaf: leaf.astype(param_dtype), params)
    row = pack_row(SEQUENCES, LENGTH)
    rounded, exact = hidden(model, params, row, "bfloat16"), hidden(model, params, row)
    assert rounded.dtype == jnp.bfloat16
    assert 1e-4 < np.abs(rounded.astype(jnp.float32) - exact).max() < 0.15
    grads = jax.grad(lambda params: jnp.sum(model.hidden(params, **row, compute_dtype="bfloat16").astype(jnp.float32)))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}
    assert all(np.isfinite(leaf.astype(jnp.float32)).all() for leaf in jax.tree.leaves(grads))


MESHES = {"data8": MeshConfig(data=8), "fsdp8": MeshConfig(fsdp=8), "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2)}


@pytest.mark.parametrize("config", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=["tied", "untied"])
def test_sharded_values_and_gradients_equal_those_of_one_device(config, spec):
    model, params = tiny_model(spec)
    rows = stack_rows(*(pack_row(SEQUENCES[i % 3 :], LENGTH) for i in range(8)))
    loss, grads = probe_grad(model, params, rows, "none")
    mesh = build_mesh(config)
    shardings = param_shardings(mesh, params)
    split_params = jax.device_put(params, shardings)
    split_rows = jax.device_put(rows, batch_sharding(mesh))
    split_loss, split_grads = probe_grad(build_model(spec, mesh), split_params, split_rows, "none")
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), split_grads, grads)


def test_fresh_parameters_are_the_same_numbers_on_any_mesh_and_already_sharded():
    mesh = build_mesh(MESHES["2x2x2"])
    params = init_params(build_model(TIED), jax.random.key(0))
    split = init_params(build_model(TIED, mesh), jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), split, params)
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim) or pytest.fail(str(leaf.sharding)),
        split,
        param_shardings(mesh, split),
    )


def test_activations_are_never_exchanged_between_devices_only_weights_gathered_and_sums_reduced():
    mesh = build_mesh(MESHES["2x2x2"])
    model = build_model(TIED, mesh)
    params = init_params(model, jax.random.key(0))
    rows = jax.device_put(stack_rows(*(pack_row(SEQUENCES, LENGTH) for _ in range(8))), batch_sharding(mesh))
    program = probe_grad.lower(model, params, rows, "layer").compile().as_text()
    kinds = re.findall(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    assert set(kinds) == {"all-gather", "all-reduce"}


def test_rows_that_the_mesh_does_not_divide_are_refused():
    model = build_model(TIED, build_mesh(MESHES["data8"]))
    params = init_params(model, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"rows .*size 3.*`trainer.mesh.data`=8"):
        model.hidden(params, **stack_rows(*(pack_row(SEQUENCES, LENGTH) for _ in range(3))))
