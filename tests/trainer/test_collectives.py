"""What devices say to one another in a step: every array of it, on every mesh, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxrl.config.trainer import MeshConfig
from tests.trainer.hlo import collectives
from tests.trainer.mesh_runs import programs_of
from tests.trainer.tiny import MESHES, UNTIED, make_config, make_programs

# Elements of the tiny model's arrays: V 64, D 32, F 64, queries 32 wide, keys and values 16, heads of 8. Layers are a scan, so
# an array of a layer stands once in the program and moves once per layer; the head runs in chunks of 8 tokens and device; 16 or
# 32 tokens are on a device.
#
# The same on every mesh whose rows are split, over all axes that split them:
COUNTS = {("s32", 3): 1, ("f32", 3): 1, ("f32", 20): 1, ("f32", 1): 1}
"""Members, loss sums, metric sums, and the one metric that is a maximum."""
NORMS = {("f32", 32): 3}
"""Gradients of the two norms of a layer and of the last one: small, and whole everywhere."""
KERNELS = {("f32", 1024): 2, ("f32", 512): 2, ("f32", 2048): 3}
"""Gradients of q and o, of k and v, of gate, up and down."""


def over(kind: str, axes: str, arrays: dict[tuple[str, int], int]) -> Counter[tuple[str, str, str, int]]:
    return Counter({(kind, axes, dtype, size): count for (dtype, size), count in arrays.items()})


GRAD_STEP = {
    ("untied", "alone"): Counter(),
    # Replicas: each sums its gradient with the others', the tied table's in two parts (as embedding and as head).
    ("tied", "data 8"): over("all-reduce", "data", COUNTS)
    + over("all-reduce", "data", NORMS | {("f32", 8): 2})  # norms of queries and keys
    + over("all-reduce", "data", KERNELS)
    + over("all-reduce", "data", {("f32", 2048): 2}),
    # Weights are gathered for the forward pass and again for the backward one; table and head are gathered once. Gradients are
    # summed and cut: on the CPU an all-reduce whose result is sliced, which the compilers of accelerators turn into a
    # reduce-scatter; the head's is one here.
    ("untied", "fsdp 8"): over("all-gather", "fsdp", {("f32", 1024): 4, ("f32", 512): 4, ("f32", 2048): 6})
    + over("all-gather", "fsdp", {("f32", 2048): 2})
    + over("all-reduce", "fsdp", COUNTS)
    + over("all-reduce", "fsdp", NORMS)
    + over("all-reduce", "fsdp", {("f32", 32): 1, ("f32", 16): 2})  # biases
    + over("all-reduce", "fsdp", KERNELS)
    + over("all-reduce", "fsdp", {("f32", 2048): 1})  # embedding
    + over("reduce-scatter", "fsdp", {("f32", 256): 1}),  # head
    # Everything at once: half of every kernel is on a tensor neighbour, so half as much is gathered; gradients are cut over fsdp
    # first, and only a quarter of a kernel is summed over replicas.
    ("untied", "2x2x2"): over("all-gather", "fsdp", {("f32", 512): 4, ("f32", 256): 4, ("f32", 1024): 6})
    + over("all-gather", "fsdp", {("f32", 1024): 2})
    + over("all-reduce", "data+fsdp", COUNTS)
    + over("all-reduce", "data+fsdp", NORMS)
    + over("all-reduce", "data+fsdp", {("f32", 16): 1, ("f32", 8): 2})  # biases
    + over("all-reduce", "fsdp", {("f32", 512): 2, ("f32", 256): 2, ("f32", 1024): 3})
    + over("all-reduce", "data", {("f32", 256): 2, ("f32", 128): 2, ("f32", 512): 3})
    + over("all-reduce", "data+fsdp", {("f32", 1024): 1})  # embedding
    + over("reduce-scatter", "fsdp", {("f32", 512): 1})  # head, and its sum over replicas
    + over("all-reduce", "data", {("f32", 512): 1})
    + over("all-reduce", "tensor", {("f32", 512): 8, ("f32", 256): 1, ("f32", 8): 5}),
    # Activations, [16 tokens or 32, 32]: the look-up, o and down in the forward pass; the inputs of gate, up, q, k, v in the
    # backward one. Of the head per chunk: its input's gradient [8, 32], and maximum, three sums and target logit of 8 tokens.
    ("untied", "tensor 2"): over("all-reduce", "tensor", {("f32", 1024): 8, ("f32", 256): 1, ("f32", 8): 5}),
}


@pytest.mark.parametrize(("spec", "mesh"), GRAD_STEP)
def test_a_gradient_step_communicates_what_is_on_this_list_and_nothing_else(spec, mesh):
    programs = programs_of(spec, mesh)
    assert collectives(programs.program("grad_step").as_text(), programs.config.mesh) == GRAD_STEP[spec, mesh]


@pytest.mark.parametrize(("spec", "mesh"), GRAD_STEP)
def test_an_update_communicates_a_scalar_per_split_array_for_the_norm_and_nothing_else(spec, mesh):
    programs = programs_of(spec, mesh)
    # Table, head and seven kernels are split over fsdp; over tensor those and three biases.
    expected = {"alone": {}, "data 8": {}, "fsdp 8": {"fsdp": 9}, "2x2x2": {"fsdp": 9, "tensor": 12}, "tensor 2": {"tensor": 12}}[mesh]
    found = collectives(programs.program("apply").as_text(), programs.config.mesh)
    assert found == Counter({("all-reduce", axis, "f32", 1): count for axis, count in expected.items()})


def test_in_bfloat16_weights_travel_in_bfloat16_and_gradients_are_summed_in_float32(tmp_path):
    mesh = MESHES["2x2x2"]
    programs = make_programs(make_config(mesh=mesh, rows=1, compute_dtype="bfloat16"), 100, UNTIED)
    # The CPU computes bfloat16 products in float32 and widens what it moves, so the partitioner's own result is read.
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_backend_optimization_level": 0}
    programs.lower("grad_step").compile(compiler_options=options)
    (partitioned,) = tmp_path.glob("*jit__accumulate*after_spmd-partitioning*")
    found = collectives(partitioned.read_text(), mesh)
    assert {dtype for kind, _, dtype, _ in found if kind == "all-gather"} == {"bf16"}
    assert {dtype for kind, axes, dtype, _ in found if kind != "all-gather" and axes != "tensor"} == {"f32", "s32"}
    # Activations between tensor neighbours are in bfloat16, softmax sums in float32.
    assert {dtype for kind, axes, dtype, size in found if axes == "tensor" and size == 512} == {"bf16"}
    widened = Counter()
    for (kind, axes, _, size), count in found.items():
        widened[kind, axes, size] += count
    in_float32 = Counter()
    for (kind, axes, _, size), count in GRAD_STEP["untied", "2x2x2"].items():
        in_float32[kind, axes, size] += count
    assert widened == in_float32, "nothing else may change with the precision"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups={{0,2},{4,6},{1,3},{5,7}}", "fsdp"),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", "fsdp"),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", "data"),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", "data+fsdp"),
        ("replica_groups={}", "data+fsdp+tensor"),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", "data+fsdp"),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=2,'axis_3'=2], device_ids=([2,4]T(1,0)) {'axis_2'}", "tensor"),
    ],
)
def test_groups_of_devices_are_named_by_their_axes_however_they_are_written(groups, axes):
    line = f"  %all-reduce.1 = (f32[], /*index=1*/bf16[8,4]{{1,0}}) all-reduce-start(%a, %b), channel_id=1, {groups}, to_apply=%add"
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    assert collectives(line + "\n  %x = f32[] fusion(%all-reduce.1), kind=kLoop", mesh) == {
        ("all-reduce", axes, "f32", 1): 1,
        ("all-reduce", axes, "bf16", 32): 1,
    }
