import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.models import build_mesh, build_model
from jaxrl.models.mesh import batch_sharding, check_model_fits, param_shardings, pin, replicated
from tests.models.tiny import BIASED, TIED, UNTIED


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    config = MeshConfig(**axes)
    return build_mesh(config, jax.devices()[: config.num_devices])


def test_a_mesh_has_the_configured_axes_all_of_type_auto():
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(jax.devices())


def test_a_device_count_that_does_not_match_is_refused_naming_both_sides():
    with pytest.raises(ConfigError, match=r"data=1 x fsdp=3 x tensor=1 = 3 devices.* has 8"):
        build_mesh(MeshConfig(fsdp=3))


@pytest.mark.parametrize("spec", [TIED, UNTIED, BIASED], ids=["tied", "untied", "biased"])
def test_every_parameter_is_split_over_fsdp_and_tensor_or_replicated_if_it_is_a_norm(spec):
    mesh = mesh_of(fsdp=2, tensor=2)
    shardings = param_shardings(mesh, build_model(spec).abstract_params(jnp.float32))
    assert shardings["embed"]["weight"].spec == PartitionSpec("tensor", "fsdp")
    attention = shardings["layers"]["attention"]
    assert attention["q_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert attention["o_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert shardings["layers"]["mlp"]["down_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert shardings["final_norm"]["scale"].spec == PartitionSpec(None)
    if spec.has_attention_bias:
        assert attention["q_proj"]["bias"].spec == PartitionSpec(None, "tensor")
    if not spec.is_tied:
        assert shardings["lm_head"]["weight"].spec == PartitionSpec("tensor", "fsdp")


def test_optimizer_moments_lie_where_their_parameters_lie_and_scalars_everywhere():
    mesh = mesh_of(fsdp=2)
    params = build_model(TIED).abstract_params(jnp.float32)
    state = param_shardings(mesh, jax.eval_shape(optax.adam(1e-3).init, params))
    assert state[0].mu == param_shardings(mesh, params)
    assert state[0].count == replicated(mesh)


def test_rows_are_split_over_data_and_fsdp():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    array = jax.device_put(jnp.zeros((8, 6)), batch_sharding(mesh))
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 6)}


@pytest.mark.parametrize("tensor", [4, 8])
def test_a_tensor_axis_that_cuts_heads_is_refused_naming_both_sides(tensor):
    with pytest.raises(ConfigError, match=rf"`trainer.mesh.tensor`={tensor} .*heads`=\d"):
        build_model(TIED, mesh_of(tensor=tensor))


def test_a_parameter_that_the_mesh_does_not_divide_is_refused_naming_both_sides():
    with pytest.raises(ConfigError, match=r"`trainer.mesh.fsdp`=3 .*`hidden_size`=16; for this model it may be 1, 2, 4, 8, 16"):
        build_model(TIED, mesh_of(fsdp=3))


def test_every_size_that_the_tensor_axis_cuts_unevenly_is_named_with_the_axes_that_fit():
    spec = dataclasses.replace(TIED, vocab_size=50, intermediate_size=36)
    with pytest.raises(ConfigError) as caught:
        check_model_fits(spec, MeshConfig(tensor=4))
    assert str(caught.value) == (
        "`trainer.mesh.tensor`=4 does not divide the model's `num_kv_heads`=2 and `vocab_size`=50; for this model it may be 1, 2. "
        "Use `trainer.mesh.fsdp` for the other devices"
    )
    check_model_fits(spec, MeshConfig(tensor=2, fsdp=8))


def test_pinning_without_a_mesh_changes_nothing_and_with_one_checks_the_shape():
    x = jnp.zeros((3, 2))
    assert pin(x, None, ("tokens", "hidden")) is x
    with pytest.raises(ConfigError, match=r"tokens .*size 3.*`trainer.mesh.data`=2 x `trainer.mesh.fsdp`=2 = 4"):
        pin(x, mesh_of(data=2, fsdp=2), ("tokens", "hidden"))
