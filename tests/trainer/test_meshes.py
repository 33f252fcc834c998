"""One objective on every mesh: the same step, the same checkpoints, and shards of the sizes that the mesh promises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.config.trainer import MeshConfig
from jaxrl.models import ModelSpec, build_mesh, build_model
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.compiles import num_compiles
from jaxrl.trainer.step import build_programs
from tests.trainer.mesh_runs import NUM_STEPS, SPECS, assert_states_close, programs_of, run_on, step_on
from tests.trainer.tiny import (
    MESHES,
    UNTIED,
    make_config,
    make_params,
    make_programs,
    make_state,
    to_host,
)

RUNS = [("tied", "data 8"), ("tied", "2x2x2"), ("untied", "fsdp 8"), ("untied", "2x2x2"), ("untied", "tensor 2")]


@pytest.mark.parametrize(("spec", "mesh"), RUNS)
def test_steps_on_a_mesh_are_the_steps_on_one_device(spec, mesh):
    alone, spread = run_on(spec, "alone"), run_on(spec, mesh)
    for step in range(NUM_STEPS):
        metrics = alone.metrics[step]
        assert min(metrics[f"tokens/{name}"] for name in ("rl", "ce", "ref_kl")) > 0 and metrics["optim/grad_norm"] > 0.1
        assert spread.metrics[step] == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert_states_close(spread.states[step], alone.states[step])
        for found, expected in zip(spread.logprobs[step], alone.logprobs[step], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), alone.states[-1].params, make_params(SPECS[spec]))
    assert min(jax.tree.leaves(moved)) > 1e-4, "a leaf that no step moves proves nothing"


@pytest.mark.parametrize("spec", SPECS)
def test_a_checkpoint_of_any_mesh_is_restored_bit_for_bit_onto_any_other_and_training_goes_on(spec, tmp_path):
    meshes = ["alone", *(mesh for name, mesh in RUNS if name == spec)]
    for saved_on, restored_on in zip(meshes, [*meshes[1:], "alone"], strict=True):
        saving, restoring = programs_of(spec, saved_on), programs_of(spec, restored_on)
        run = run_on(spec, saved_on)
        before = run.states[1]
        state = jax.device_put(before, jax.tree.map(lambda leaf: leaf.sharding, saving.abstract_state))
        directory = tmp_path / f"from {saved_on}"
        before_saving = num_compiles()
        Checkpointer(directory, 1, saving.mesh).save(2, state, {"orchestrator": b"queued"})
        state, parts = Checkpointer(directory, 1, restoring.mesh).restore(2, restoring.abstract_state)
        assert num_compiles() == before_saving, "saving and restoring must not compile anything in the middle of a run"
        assert parts == {"orchestrator": b"queued"}
        jax.tree.map(np.testing.assert_array_equal, to_host(state), before)
        described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
        assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), restoring.abstract_state)
        state, metrics, _ = step_on(restoring, state, 3)
        assert_states_close(to_host(state), run.states[2])
        assert metrics == pytest.approx(run.metrics[2], rel=1e-5, abs=1e-6)


# Shards. V 64, D 32, F 64, L 2, four heads and two key-value heads of 8: queries are 32 wide, keys and values 16. All worked out by hand.

NORMS = {"final_norm/scale": (32,), "layers/input_norm/scale": (2, 32), "layers/post_attention_norm/scale": (2, 32)}
SHARDS = {
    "data 8": {
        "embed/weight": (64, 32),
        "lm_head/weight": (64, 32),
        "layers/attention/q_proj/kernel": (2, 32, 32),
        "layers/attention/k_proj/kernel": (2, 32, 16),
        "layers/attention/v_proj/kernel": (2, 32, 16),
        "layers/attention/o_proj/kernel": (2, 32, 32),
        "layers/attention/q_proj/bias": (2, 32),
        "layers/attention/k_proj/bias": (2, 16),
        "layers/attention/v_proj/bias": (2, 16),
        "layers/mlp/gate_proj/kernel": (2, 32, 64),
        "layers/mlp/up_proj/kernel": (2, 32, 64),
        "layers/mlp/down_proj/kernel": (2, 64, 32),
    },
    "fsdp 8": {
        "embed/weight": (64, 4),
        "lm_head/weight": (64, 4),
        "layers/attention/q_proj/kernel": (2, 4, 32),
        "layers/attention/k_proj/kernel": (2, 4, 16),
        "layers/attention/v_proj/kernel": (2, 4, 16),
        "layers/attention/o_proj/kernel": (2, 32, 4),
        "layers/attention/q_proj/bias": (2, 32),
        "layers/attention/k_proj/bias": (2, 16),
        "layers/attention/v_proj/bias": (2, 16),
        "layers/mlp/gate_proj/kernel": (2, 4, 64),
        "layers/mlp/up_proj/kernel": (2, 4, 64),
        "layers/mlp/down_proj/kernel": (2, 64, 4),
    },
    "2x2x2": {
        "embed/weight": (32, 16),
        "lm_head/weight": (32, 16),
        "layers/attention/q_proj/kernel": (2, 16, 16),
        "layers/attention/k_proj/kernel": (2, 16, 8),
        "layers/attention/v_proj/kernel": (2, 16, 8),
        "layers/attention/o_proj/kernel": (2, 16, 16),
        "layers/attention/q_proj/bias": (2, 16),
        "layers/attention/k_proj/bias": (2, 8),
        "layers/attention/v_proj/bias": (2, 8),
        "layers/mlp/gate_proj/kernel": (2, 16, 32),
        "layers/mlp/up_proj/kernel": (2, 16, 32),
        "layers/mlp/down_proj/kernel": (2, 32, 16),
    },
    "tensor 2": {
        "embed/weight": (32, 32),
        "lm_head/weight": (32, 32),
        "layers/attention/q_proj/kernel": (2, 32, 16),
        "layers/attention/k_proj/kernel": (2, 32, 8),
        "layers/attention/v_proj/kernel": (2, 32, 8),
        "layers/attention/o_proj/kernel": (2, 16, 32),
        "layers/attention/q_proj/bias": (2, 16),
        "layers/attention/k_proj/bias": (2, 8),
        "layers/attention/v_proj/bias": (2, 8),
        "layers/mlp/gate_proj/kernel": (2, 32, 32),
        "layers/mlp/up_proj/kernel": (2, 32, 32),
        "layers/mlp/down_proj/kernel": (2, 32, 32),
    },
}


def by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_moments_and_gradients_are_cut_into_the_shards_of_the_table(mesh):
    config = MESHES[mesh]
    programs = make_programs(make_config(mesh=config, rows=1 if config.row_shards > 1 else 2), 100, UNTIED)
    state = make_state(programs)
    moments = state.opt_state[1]
    for tree in (state.params, moments.mu, moments.nu, programs.zero_accumulator().grads):
        found = {path: {shard.data.shape for shard in leaf.addressable_shards} for path, leaf in by_path(tree).items()}
        assert found == {path: {shape} for path, shape in (SHARDS[mesh] | NORMS).items()}
    scalars = (state.step, state.num_skipped, state.num_empty, moments.count)
    assert all(scalar.sharding.is_fully_replicated for scalar in scalars)


def spec_of(
    vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, heads: tuple[int, int], head_dim: int, *, is_tied: bool
) -> ModelSpec:
    return dataclasses.replace(
        UNTIED,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        is_tied=is_tied,
    )


SMOLLM2 = spec_of(49152, 576, 1536, 30, (9, 3), 64, is_tied=True)
LLAMA3_8B = spec_of(128256, 4096, 14336, 32, (32, 8), 128, is_tied=False)
QWEN2_5_7B = spec_of(152064, 3584, 18944, 28, (28, 4), 128, is_tied=False)
REAL = {
    "SmolLM2, fsdp 8": (SMOLLM2, MeshConfig(fsdp=8), (49152, 72), (30, 72, 576), (30, 72, 192), (30, 1536, 72)),
    "SmolLM2, fsdp 2 x tensor 3": (SMOLLM2, MeshConfig(fsdp=2, tensor=3), (16384, 288), (30, 288, 192), (30, 288, 64), (30, 512, 288)),
    "Llama-3-8B, fsdp 8": (LLAMA3_8B, MeshConfig(fsdp=8), (128256, 512), (32, 512, 4096), (32, 512, 1024), (32, 14336, 512)),
    "Llama-3-8B, 2x2x2": (
        LLAMA3_8B,
        MeshConfig(data=2, fsdp=2, tensor=2),
        (64128, 2048),
        (32, 2048, 2048),
        (32, 2048, 512),
        (32, 7168, 2048),
    ),
    "Qwen2.5-7B, fsdp 2 x tensor 4": (
        QWEN2_5_7B,
        MeshConfig(fsdp=2, tensor=4),
        (38016, 1792),
        (28, 1792, 896),
        (28, 1792, 128),
        (28, 4736, 1792),
    ),
}
"""A spec, a mesh and the shard shapes of the embedding, the query, key and down projections."""


@pytest.mark.parametrize("name", REAL)
def test_nothing_large_of_a_real_model_lies_whole_on_a_device(name):
    spec, mesh_config, embed, query, key, down = REAL[name]
    mesh = build_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    programs = build_programs(build_model(spec, mesh), make_config(mesh=mesh_config), mesh, 100)
    state, accumulator = programs.abstract_state, programs.abstract_accumulator
    moments = state.opt_state[1]
    num_shards = mesh_config.fsdp * mesh_config.tensor
    for tree in (state.params, moments.mu, moments.nu, accumulator.grads):
        shards = {path: leaf.sharding.shard_shape(leaf.shape) for path, leaf in by_path(tree).items()}
        expected = {
            "embed/weight": embed,
            "layers/attention/q_proj/kernel": query,
            "layers/attention/k_proj/kernel": key,
            "layers/mlp/down_proj/kernel": down,
        }
        assert {path: shards[path] for path in expected} == expected
    for path, leaf in by_path((state, accumulator)).items():
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
        # Biases and norms are whole; everything that is a megabyte in float32 is split over all of fsdp and tensor.
        assert leaf.size < 2**18 or shard * num_shards == leaf.size, f"{path} {leaf.shape} {leaf.sharding.spec}"
    total = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.params))
    assert total * num_shards == pytest.approx(spec.num_params, rel=0.01)
