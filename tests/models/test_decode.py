"""The engine's view of a model against the model itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.engine.cache import init_cache, insert_prompts
from jaxrl.models.decode import DecodeParams, decode_step, prefill, score, to_decode_params
from jaxrl.models.spec import ModelSpec
from jaxrl.models.transformer import Model, build_model
from tests.engine.tiny import SPEC, random_params

UNTIED_WITH_BIAS = dataclasses.replace(SPEC, is_tied=False, has_qk_norm=False, has_attention_bias=True, num_kv_heads=1)
to_engine = jax.jit(to_decode_params, static_argnums=(1, 2))


@functools.cache
def model_of(spec: ModelSpec) -> tuple[Model, dict[str, Any]]:
    """Return a model with parameters none of which is zero or one."""
    model = build_model(spec)
    return model, random_params(model, seed=0)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(model: Model, params: dict[str, Any], token_ids_1T: jax.Array) -> jax.Array:
    """Return [T, V] logits by the trainer's forward pass."""
    positions = jnp.arange(token_ids_1T.shape[1])[None]
    return (model.hidden(params, token_ids_1T, positions, jnp.ones_like(token_ids_1T)) @ model.head(params).T)[0]


@pytest.mark.parametrize("spec", [SPEC, UNTIED_WITH_BIAS], ids=["qk_norm_tied", "bias_untied"])
def test_prefill_then_decode_gives_the_logits_of_one_forward_pass(spec: ModelSpec) -> None:
    model, params = model_of(spec)
    sequence = np.random.default_rng(0).integers(0, spec.vocab_size, 12).astype(np.int32)
    expected = np.asarray(full_logits(model, params, sequence[None]))
    weights = to_engine(params, spec, "float32")
    prompt = np.zeros((2, 8), np.int32)
    prompt[1, :5] = sequence[:5]
    prompt_kv = jax.jit(functools.partial(prefill, spec=spec))(weights, prompt)
    cache = jax.jit(insert_prompts)(init_cache(spec, 3, 16, jnp.float32), prompt_kv, np.array([1], np.int32), np.array([2], np.int32))
    step = jax.jit(functools.partial(decode_step, spec=spec))
    for t in range(5, 12):
        token_ids, positions = np.array([1, 2, sequence[t]], np.int32), np.array([0, t, t], np.int32)
        logits, cache = step(weights, cache, token_ids, positions)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits[2], expected[t], rtol=0, atol=1e-5)


@functools.cache
def long_window() -> tuple[np.ndarray, Callable[..., Any], list[Any]]:
    """Return a sequence of 300 tokens, the compiled decode step, and a cache with its first 130 tokens in slots 0 and 1."""
    weights = to_engine(model_of(SPEC)[1], SPEC, "float32")
    sequence = np.random.default_rng(5).integers(0, SPEC.vocab_size, 300).astype(np.int32)
    prompt_kv = jax.jit(functools.partial(prefill, spec=SPEC))(weights, np.pad(sequence[None, :130], ((0, 0), (0, 20))))
    to_both = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    cache = jax.jit(insert_prompts)(init_cache(SPEC, 2, 300, jnp.float32), prompt_kv, *to_both)
    return sequence, jax.jit(functools.partial(decode_step, weights, spec=SPEC)), cache


def test_blocks_of_queries_and_columns_give_the_logits_of_one_forward_pass_also_where_the_window_is_no_multiple() -> None:
    model, params = model_of(SPEC)
    sequence, step, cache = long_window()
    expected = np.asarray(full_logits(model, params, sequence[None]))
    for t in range(130, 300):
        logits, cache = step(cache, np.array([sequence[t], 1], np.int32), np.array([t, 0], np.int32))
        np.testing.assert_allclose(logits[0], expected[t], rtol=0, atol=2e-5)
    scores = jax.jit(functools.partial(score, spec=SPEC))(to_engine(params, SPEC, "float32"), sequence[None], np.ones(1, np.float32))
    logprobs = jax.nn.log_softmax(expected[:-1])[np.arange(299), sequence[1:]]
    np.testing.assert_allclose(scores[0, 1:], logprobs, rtol=0, atol=2e-5)


def test_a_slot_has_the_same_bits_however_far_its_neighbours_look() -> None:
    sequence, step, cache = long_window()
    fed = np.array([sequence[130], 7], np.int32)
    results = [step(cache, fed, np.array([120, neighbour], np.int32))[0][0] for neighbour in (0, 127, 128, 255, 299)]
    assert len({np.asarray(logits).tobytes() for logits in results}) == 1


def test_rows_without_a_temperature_are_skipped_and_change_nothing() -> None:
    _, params = model_of(SPEC)
    weights, scorer = to_engine(params, SPEC, "float32"), jax.jit(functools.partial(score, spec=SPEC))
    rows = np.random.default_rng(4).integers(0, SPEC.vocab_size, (3, 70)).astype(np.int32)
    everything = np.asarray(scorer(weights, rows, np.array([1.0, 0.5, 1.0], np.float32)))
    some = np.asarray(scorer(weights, rows, np.array([0.0, 0.5, 0.0], np.float32)))
    assert some[1].tobytes() == everything[1].tobytes() and (some[[0, 2]] == 0).all() and (everything[:, 1:] < 0).all()


@pytest.mark.slow
def test_op_by_op_prefill_decode_and_score_are_those_of_the_compiled_functions() -> None:
    _, params = model_of(SPEC)
    weights = to_engine(params, SPEC, "float32")
    prompt, fed, at, slot = np.array([[3, 1, 4]], np.int32), np.array([9], np.int32), np.array([3], np.int32), np.zeros(1, np.int32)

    def one_token(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> jax.Array:
        prompt_kv = wrap(functools.partial(prefill, spec=SPEC))(weights, prompt)
        cache = wrap(insert_prompts)(init_cache(SPEC, 1, 8, jnp.float32), prompt_kv, slot, slot)
        return wrap(functools.partial(decode_step, spec=SPEC))(weights, cache, fed, at)[0]

    np.testing.assert_allclose(one_token(lambda function: function), one_token(jax.jit), rtol=0, atol=1e-5)
    compiled = jax.jit(functools.partial(score, spec=SPEC))(weights, prompt, np.ones(1, np.float32))
    np.testing.assert_allclose(score(weights, jnp.asarray(prompt), jnp.ones(1), spec=SPEC), compiled, rtol=0, atol=1e-5)


def test_a_write_past_the_window_is_dropped() -> None:
    _, params = model_of(SPEC)
    weights = to_engine(params, SPEC, "float32")
    cache = init_cache(SPEC, 1, 4, jnp.float32)
    _, after = jax.jit(functools.partial(decode_step, spec=SPEC))(weights, cache, np.array([3], np.int32), np.array([4], np.int32))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(after))


def test_scores_are_log_softmax_of_one_forward_pass_at_each_rows_temperature() -> None:
    model, params = model_of(UNTIED_WITH_BIAS)
    weights = to_engine(params, UNTIED_WITH_BIAS, "float32")
    rows = np.random.default_rng(3).integers(0, SPEC.vocab_size, (2, 9)).astype(np.int32)
    temperatures = np.array([1.0, 0.5], np.float32)
    scores = np.asarray(jax.jit(functools.partial(score, spec=UNTIED_WITH_BIAS))(weights, rows, temperatures))
    assert scores.shape == rows.shape and (scores[:, 0] == 0).all()
    for row, temperature, row_scores in zip(rows, temperatures, scores, strict=True):
        logits = np.asarray(full_logits(model, params, row[None]), np.float64)[:-1] / temperature
        logits -= logits.max(axis=1, keepdims=True)
        expected = logits[np.arange(8), row[1:]] - np.log(np.exp(logits).sum(axis=1))
        np.testing.assert_allclose(row_scores[1:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("convert", [to_engine, to_decode_params], ids=["jit", "eager"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_no_output_shares_a_buffer_with_an_input_or_another_output(convert: Callable[..., DecodeParams], is_tied: bool) -> None:
    spec = dataclasses.replace(SPEC, num_layers=1, is_tied=is_tied)
    _, params = model_of(spec)
    weights = convert(params, spec, "float32")
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, weights))]
    assert len(set(pointers)) == len(pointers)
    assert (weights.head_VD is None) == is_tied


def test_kernels_are_fused_and_turned() -> None:
    _, params = model_of(UNTIED_WITH_BIAS)
    layer = to_engine(params, UNTIED_WITH_BIAS, "float32").layers[1]
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    np.testing.assert_array_equal(layer["qkv"][:32], attention["q_proj"]["kernel"][1].T)
    np.testing.assert_array_equal(layer["qkv"][32:40], attention["k_proj"]["kernel"][1].T)
    np.testing.assert_array_equal(layer["qkv_bias"][40:], attention["v_proj"]["bias"][1])
    np.testing.assert_array_equal(layer["gate_up"][48:], mlp["up_proj"]["kernel"][1].T)
    np.testing.assert_array_equal(layer["down"], mlp["down_proj"]["kernel"][1].T)


def test_bfloat16_weights_give_float32_logits_near_the_exact_ones() -> None:
    model, params = model_of(SPEC)
    weights = to_engine(params, SPEC, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    rows = np.random.default_rng(3).integers(0, SPEC.vocab_size, (1, 9)).astype(np.int32)
    scores = jax.jit(functools.partial(score, spec=SPEC))(weights, rows, np.ones(1, np.float32))
    exact = jax.nn.log_softmax(full_logits(model, params, rows))[np.arange(8), rows[0, 1:]]
    chex.assert_type(scores, jnp.float32)
    assert 0 < float(jnp.abs(scores[0, 1:] - exact).mean()) < 0.3


def test_parameters_of_another_model_are_refused() -> None:
    _, params = model_of(SPEC)
    with pytest.raises(AssertionError):
        to_decode_params(params, dataclasses.replace(SPEC, num_layers=3), "float32")
