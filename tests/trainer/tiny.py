"""A two-layer network and hand-made batches for the trainer's tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.batching import pack
from jaxrl.config.trainer import MeshConfig, TrainerConfig
from jaxrl.models import ModelSpec, build_mesh, build_model
from jaxrl.models.transformer import Params
from jaxrl.trainer.state import Accumulator, TrainState
from jaxrl.trainer.step import StepPrograms, build_programs, densify
from jaxrl.types import TrainBatch, TrainingSample

SPEC = ModelSpec.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
    }
)
UNTIED = dataclasses.replace(SPEC, family="qwen2", is_tied=False, has_qk_norm=False, has_attention_bias=True)
"""What `SPEC` does not have: a head of its own, and biases in place of the norms on queries and keys."""
ROW_LENGTH = 16
ALONE = MeshConfig()
MESHES = {
    "data 8": MeshConfig(data=8),
    "fsdp 8": MeshConfig(fsdp=8),
    "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2),
    "tensor 2": MeshConfig(tensor=2),
}
"""What eight devices, or two, can be arranged as."""


def make_config(**fields: Any) -> TrainerConfig:
    """A small trainer configuration; keyword arguments replace its fields. Compiling is slow: change few of them."""
    defaults = {
        "row_length": ROW_LENGTH,
        "rows": 2,
        "max_segments": 4,
        "head_chunk_tokens": 8,
        "optimizer": {
            "lr": 1e-2,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "max_grad_norm": 0.05,
            "schedule": {"type": "constant", "warmup_steps": 4},
        },
    }
    return TrainerConfig(**(defaults | fields))


@functools.cache
def make_programs(config: TrainerConfig, max_steps: int = 100, spec: ModelSpec = SPEC) -> StepPrograms:
    """Programs of a tiny model on the first devices of the configured mesh; kept, because compiling takes seconds."""
    mesh = build_mesh(config.mesh, jax.devices()[: config.mesh.num_devices])
    return build_programs(build_model(spec, mesh), config, mesh, max_steps)


@functools.cache
def make_params(spec: ModelSpec = SPEC) -> Params:
    """Initial weights in numpy, the same every time and for every mesh."""
    rng = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_norm = path[-1].key == "scale"
        return np.ones(leaf.shape, np.float32) if is_norm else rng.normal(0, 0.1, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, build_model(spec).abstract_params("float32"))


def make_state(programs: StepPrograms) -> TrainState:
    """A fresh state with the same weights every time."""
    return programs.init_state(make_params(programs.model.spec))


def make_sample(
    seed: int, length: int, *, num_prompt: int = 2, streams: Sequence[str] = ("advantages",)
) -> TrainingSample:
    """A random sample whose tokens after the prompt were sampled."""
    rng = np.random.default_rng(seed)
    loss_mask = np.arange(length) >= num_prompt
    sampled = {name: np.where(loss_mask, rng.normal(size=length), 0.0).astype(np.float32) for name in streams}
    if "ref_logprobs" in sampled:
        sampled["ref_logprobs"] = np.where(loss_mask, -4.0 + 0.1 * rng.normal(size=length), 0.0).astype(np.float32)
    return TrainingSample(
        token_ids=rng.integers(1, SPEC.vocab_size, length).astype(np.int32),
        loss_mask=loss_mask,
        inference_logprobs=np.where(loss_mask, -4.0 + 0.1 * rng.normal(size=length), 0.0).astype(np.float32),
        temperatures=np.where(loss_mask, 0.8, 1.0).astype(np.float32),
        env_name="toy",
        **sampled,
    )


def make_batch(samples: Sequence[TrainingSample], config: TrainerConfig, step: int = 1) -> TrainBatch:
    """Pack samples the way a run does."""
    return pack(
        samples,
        row_length=config.row_length,
        rows=config.rows,
        shards=config.mesh.row_shards,
        step=step,
        max_segments=config.max_segments,
    )


def accumulate(programs: StepPrograms, state: TrainState, batch: TrainBatch) -> Accumulator:
    """Sum a batch's gradient and metrics."""
    denominators = programs.psum_denominators(batch.member_counts)
    accumulator = programs.zero_accumulator()
    for micro_batch in batch.micro_batches:
        accumulator, _ = programs.grad_step(state, accumulator, densify(micro_batch), denominators)
    return accumulator


def take_step(programs: StepPrograms, state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict[str, float]]:
    """One whole optimizer step."""
    state, metrics = programs.apply(state, accumulate(programs, state, batch))
    return state, {name: float(value) for name, value in metrics.items()}


def to_host(tree: Any) -> Any:
    """A copy in numpy, independent of donated buffers."""
    return jax.tree.map(np.array, jax.device_get(tree))
