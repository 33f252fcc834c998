"""Where every array of the trainer lives: the only place that builds a mesh or writes a PartitionSpec for a model.

In go a `MeshConfig` and shapes; out come a `Mesh` (axes data, fsdp, tensor; Auto axis types) and NamedShardings.
Dimensions carry logical names ("vocab", "rows", ...) and one table maps those to mesh axes. It moves no data: callers
hand the shardings to `jax.jit` or `jax.device_put`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.config.trainer import BATCH_AXES, DATA_AXIS, FSDP_AXIS, MESH_AXES, TENSOR_AXIS, MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.models.spec import ModelSpec

LOGICAL_RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": BATCH_AXES,
    "tokens": BATCH_AXES,
    "positions": None,
    "hidden": None,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "feed_forward": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
    "embed": FSDP_AXIS,
    "layers": None,
    "head_dim": None,
    "norm": None,
}
"""Mesh axis (or axes) that a dimension is split over; `hidden` is the width of an activation, `embed` the same width in
a parameter."""

PARAM_AXES: dict[tuple[str, str], tuple[str, ...]] = {
    ("embed", "weight"): ("vocab", "embed"),
    ("lm_head", "weight"): ("vocab", "embed"),
    ("q_proj", "kernel"): ("embed", "heads"),
    ("k_proj", "kernel"): ("embed", "kv_heads"),
    ("v_proj", "kernel"): ("embed", "kv_heads"),
    ("o_proj", "kernel"): ("heads", "embed"),
    ("q_proj", "bias"): ("heads",),
    ("k_proj", "bias"): ("kv_heads",),
    ("v_proj", "bias"): ("kv_heads",),
    ("q_norm", "scale"): ("head_dim",),
    ("k_norm", "scale"): ("head_dim",),
    ("gate_proj", "kernel"): ("embed", "feed_forward"),
    ("up_proj", "kernel"): ("embed", "feed_forward"),
    ("down_proj", "kernel"): ("feed_forward", "embed"),
    ("input_norm", "scale"): ("norm",),
    ("post_attention_norm", "scale"): ("norm",),
    ("final_norm", "scale"): ("norm",),
}
"""Logical axes of a parameter by the last two names of its path; a leaf stacked over layers has "layers" in front."""


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """Arrange devices as data x fsdp x tensor.

    Args:
      config: devices per axis.
      devices: the devices to use, all that JAX sees when None.

    Returns:
      A mesh with the axes `MESH_AXES`, all of type Auto.

    Raises:
      ConfigError: the product of the axes is not the number of devices.

    Example:
      >>> build_mesh(MeshConfig(), devices=jax.devices()[:1]).axis_names
      ('data', 'fsdp', 'tensor')
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = tuple(config.shape[axis] for axis in MESH_AXES)
    if config.num_devices != len(devices):
        raise ConfigError(
            f"`trainer.mesh` asks for data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} = {config.num_devices} "
            f"devices, but the trainer has {len(devices)} ({devices[0].platform}); change the mesh so that the product is "
            f"{len(devices)}, for example `trainer.mesh.fsdp`={len(devices)} and the others 1"
        )
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def check_model_fits(spec: ModelSpec, mesh: Mesh | MeshConfig) -> None:
    """Refuse a mesh that cannot split a model evenly, before any weight is read or anything is compiled.

    The tensor axis splits heads, key/value heads, feed-forward columns and the vocabulary, the fsdp axis the hidden
    width. Rows always divide: `trainer.rows` counts those of each shard.

    Args:
      spec: sizes of the model.
      mesh: from `build_mesh`, or its configuration: no device is needed.

    Raises:
      ConfigError: an axis does not divide a size of the model; it names both, and the axes that would.

    Example:
      >>> spec = ModelSpec.from_hf({"model_type": "qwen3", "vocab_size": 510, "hidden_size": 64, "intermediate_size": 96,
      ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})
      >>> check_model_fits(spec, MeshConfig(tensor=4))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jaxrl.errors.ConfigError: `trainer.mesh.tensor`=4 does not divide the model's `num_kv_heads`=2 and `vocab_size`=510; for ...
    """
    for axis, names, other in (
        (TENSOR_AXIS, ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"), FSDP_AXIS),
        (FSDP_AXIS, ("hidden_size",), DATA_AXIS),
    ):
        sizes = {name: getattr(spec, name) for name in names}
        shards = mesh.shape[axis]
        cut = " and ".join(f"`{name}`={size}" for name, size in sizes.items() if size % shards)
        if cut:
            common = math.gcd(*sizes.values())
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ConfigError(
                f"`trainer.mesh.{axis}`={shards} does not divide the model's {cut}; for this model it may be {fitting}. "
                f"Use `trainer.mesh.{other}` for the other devices"
            )


def param_shardings(mesh: Mesh, params_tree: Any) -> Any:
    """Sharding of every leaf of a parameter tree, or of a tree that holds parameter trees (such as optimizer moments).

    Args:
      mesh: from `build_mesh`.
      params_tree: pytree of arrays or ShapeDtypeStructs whose paths end in parameter names; scalars are replicated.

    Returns:
      The same tree with a NamedSharding for each leaf.

    Raises:
      ConfigError: a dimension is not a multiple of the mesh axes that split it.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_sharding(mesh, _names(path), leaf.shape), params_tree)


def with_shardings(mesh: Mesh, params_tree: Any) -> Any:
    """Shape, dtype and sharding of every leaf of such a tree: what a program or a checkpoint is laid out by.

    Args:
      mesh: from `build_mesh`.
      params_tree: as in `param_shardings`.

    Returns:
      The same tree of ShapeDtypeStructs.

    Raises:
      ConfigError: as in `param_shardings`.
    """
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params_tree,
        param_shardings(mesh, params_tree),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a micro-batch array [rows, length, ...]: rows over (data, fsdp), the rest whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def pin(x: jax.Array, mesh: Mesh | None, logical_axes: Sequence[str]) -> jax.Array:
    """Hold an activation to the layout of its logical axes; the partitioner may choose others freely between pins.

    Args:
      x: any array.
      mesh: from `build_mesh`; None (one device) returns `x` as it is.
      logical_axes: one name of `LOGICAL_RULES` per dimension of `x`.

    Returns:
      `x`, constrained.

    Raises:
      ConfigError: a dimension is not a multiple of the mesh axes that split it.
    """
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _sharding(mesh, logical_axes, x.shape, "an activation"))


def _leaf_sharding(mesh: Mesh, names: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    if not shape:
        return replicated(mesh)
    axes = PARAM_AXES[names[-2], names[-1]]
    if len(shape) == len(axes) + 1:
        axes = ("layers", *axes)
    return _sharding(mesh, axes, shape, f"parameter `{'/'.join(names)}`")


def _sharding(mesh: Mesh, logical_axes: Sequence[str], shape: tuple[int, ...], what: str) -> NamedSharding:
    assert len(logical_axes) == len(shape), f"{what} of shape {shape} was given the axes {tuple(logical_axes)}"
    parts = tuple(LOGICAL_RULES[axis] for axis in logical_axes)
    for axis, part, size in zip(logical_axes, parts, shape, strict=True):
        mesh_axes = (part,) if isinstance(part, str) else part or ()
        shards = math.prod(mesh.shape[name] for name in mesh_axes)
        if size % shards:
            setting = " x ".join(f"`trainer.mesh.{name}`={mesh.shape[name]}" for name in mesh_axes)
            raise ConfigError(
                f"the {axis} dimension of {what} of shape {tuple(shape)} has size {size}, which {setting} = {shards} shards do "
                f"not divide; choose a mesh whose product divides {size}"
            )
    return NamedSharding(mesh, PartitionSpec(*parts))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
