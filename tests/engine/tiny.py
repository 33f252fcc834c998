"""A tiny policy and the full forward pass that engine tests compare with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine import Engine
from jaxrl.inference.endpoint import GenerateRequest, Generation, TokenSampling
from jaxrl.models.decode import DecodeParams, to_decode_params
from jaxrl.models.spec import ModelSpec
from jaxrl.models.transformer import Model, build_model

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    is_tied=True,
    has_qk_norm=True,
    has_attention_bias=False,
    max_position_embeddings=128,
)
WINDOW = 32
MODEL = build_model(SPEC)


def random_params(model: Model, seed: int) -> dict[str, Any]:
    """Return parameters whose tokens are not all about as likely (as fresh ones are), with norms and biases of all sizes.

    Drawn by numpy: `init_params` would be one more program to compile.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        is_scale, is_bias = path[-1].key == "scale", path[-1].key == "bias"
        values = rng.normal(scale=0.2, size=leaf.shape) + float(is_scale)
        return jnp.asarray(values if is_scale or is_bias else 1.2 * values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params(jnp.float32))


@functools.cache
def trainer_params(seed: int = 0) -> dict[str, Any]:
    """Return the parameters of one policy per seed."""
    return random_params(MODEL, seed)


@functools.cache
def decode_params(seed: int = 0) -> DecodeParams:
    """Return the engine's view of `trainer_params(seed)`."""
    return jax.jit(to_decode_params, static_argnums=(1, 2))(trainer_params(seed), SPEC, "float32")


def make_engine(seed: int = 0, *, version: int = 0, num_slots: int = 8, **settings: Any) -> Engine:
    """Return an engine with a window of 32 tokens; `decode_text`, `max_logprobs` and `clock` go to it, other settings to its config."""
    wiring = {name: settings.pop(name) for name in ("decode_text", "max_logprobs", "clock") if name in settings}
    config = EmbeddedInferenceConfig(num_slots=num_slots, **({"max_model_len": WINDOW, "prefill_rows": 4} | settings))
    return Engine(SPEC, decode_params(seed), config, version=version, **wiring)


def make_request(name: str = "r", prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int = 8, **settings: Any) -> GenerateRequest:
    """Return a request; further settings go to `TokenSampling`."""
    return GenerateRequest(name, np.asarray(prompt, np.int32), TokenSampling(max_tokens=max_tokens, **settings))


def finish(engine: Engine) -> None:
    """Tick until there is nothing left to do."""
    for _ in range(1000):
        if not engine.has_work():
            return
        engine.tick()
    raise AssertionError(f"still at work after 1000 ticks: {engine.describe()}")


def generate(engine: Engine, *requests: GenerateRequest) -> list[Generation]:
    """Submit, finish, and return the generations in order."""
    futures = [engine.submit(request) for request in requests]
    finish(engine)
    return [future.result(timeout=0) for future in futures]


@jax.jit
def _logits(params: dict[str, Any], token_ids_1T: jax.Array) -> jax.Array:
    positions = jnp.arange(token_ids_1T.shape[1])[None]
    hidden = MODEL.hidden(params, token_ids_1T, positions, jnp.ones_like(token_ids_1T))
    return hidden[0] @ MODEL.head(params).T


def full_logits(token_ids: Sequence[int] | np.ndarray, seed: int = 0) -> np.ndarray:
    """Return [T, V] logits by one forward pass of the trainer's model over the whole sequence."""
    padded = np.zeros((1, WINDOW), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_logits(trainer_params(seed), padded))[: len(token_ids)]


def full_logprobs(token_ids: Sequence[int] | np.ndarray, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
    """Return [T] logprobs of a sequence's own tokens by the full forward pass, in float64; index 0 is 0."""
    logits = full_logits(token_ids, seed)[:-1].astype(np.float64) / temperature
    log_normaliser = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    chosen = logits[np.arange(len(logits)), np.asarray(token_ids)[1:]]
    return np.concatenate([[0.0], chosen - log_normaliser])
