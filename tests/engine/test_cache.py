"""Allocation and prompt insertion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.engine import cache as engine_cache
from jaxrl.engine.cache import cache_bytes, decode_and_sample, init_cache, insert_prompts, prefill_into_slots
from jaxrl.engine.sampling import SamplingArrays
from jaxrl.models.decode import LayerKV, prefill
from tests.engine.tiny import SPEC, decode_params


def test_the_estimate_is_the_size_of_the_allocation() -> None:
    for dtype in ("float32", "bfloat16"):
        cache = init_cache(SPEC, 3, 10, jnp.dtype(dtype))
        assert len(cache) == SPEC.num_layers
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == cache_bytes(SPEC, 3, 10, dtype)


def test_one_prefilled_row_goes_to_many_slots_and_other_slots_stay() -> None:
    cache = [LayerKV(jnp.full((4, 2, 3, 6), -1.0), jnp.full((4, 2, 6, 3), -2.0))]
    rows = jnp.arange(2.0).reshape(2, 1, 1, 1) * jnp.ones((2, 2, 4, 3))
    rows_N, slots_N = np.array([0, 1, 2, 1, 0, -1], np.int32), np.array([3, 0, 1, 2, 4, 1], np.int32)
    (layer,) = jax.jit(insert_prompts)(cache, [LayerKV(jnp.swapaxes(rows, 2, 3), rows + 10)], rows_N, slots_N)
    for array, untouched, base in ((jnp.swapaxes(layer.keys, 2, 3), -1.0, 0.0), (layer.values, -2.0, 10.0)):
        first = np.asarray(array)[:, 0, :, 0]
        assert first[:, :4].tolist() == [[base + 1] * 4, [untouched] * 4, [base + 1] * 4, [base] * 4]
        assert (first[:, 4:] == untouched).all()


def test_prompts_run_in_groups_of_rows_are_those_of_one_call_and_rows_that_go_nowhere_are_not_run() -> None:
    prompts = np.random.default_rng(0).integers(0, SPEC.vocab_size, (5, 48)).astype(np.int32)
    empty = init_cache(SPEC, 4, 50, jnp.float32)
    # Groups of two rows: the last group holds row 4 alone, and row 3 goes nowhere.
    rows_N, slots_N = np.array([0, 1, 2, 4, 3], np.int32), np.array([3, 1, 0, 2, 4], np.int32)
    expected = insert_prompts(empty, jax.jit(prefill, static_argnames="spec")(decode_params(), prompts, spec=SPEC), rows_N, slots_N)
    filled = prefill_into_slots(decode_params(), init_cache(SPEC, 4, 50, jnp.float32), prompts, rows_N, slots_N, spec=SPEC)
    for ours, whole in zip(jax.tree.leaves(filled), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-5)
    nowhere = prefill_into_slots(decode_params(), init_cache(SPEC, 4, 50, jnp.float32), prompts, rows_N, np.full(5, 4, np.int32), spec=SPEC)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nowhere))


def test_sampling_a_group_of_slots_at_a_time_gives_the_tokens_of_all_at_once(monkeypatch) -> None:
    sampling = SamplingArrays(
        np.array([1.0, 0.7, 0.0, 1.0, 1.0, 1.3], np.float32),
        np.array([0, 5, 0, 0, 0, 0], np.int32),
        np.ones(6, np.float32),
        np.zeros(6, np.float32),
        np.arange(12, dtype=np.uint32).reshape(6, 2),
        np.array([0, 0, 3, 0, 0, 0], np.int32),
    )
    token_ids, positions = np.arange(6, dtype=np.int32), np.arange(6, dtype=np.int32)

    def sample(window: int) -> np.ndarray:
        cache = init_cache(SPEC, 6, window, jnp.float32)
        return np.asarray(decode_and_sample(decode_params(), cache, token_ids, positions, sampling, spec=SPEC, num_steps=2, num_top=3)[1])

    at_once = sample(window=16)
    monkeypatch.setattr(engine_cache, "SAMPLED_LOGITS", 2 * SPEC.vocab_size)
    grouped = sample(window=17)  # another window is another program: the first one is compiled already
    np.testing.assert_array_equal(grouped[0], at_once[0])
    np.testing.assert_allclose(grouped[1].view(np.float32), at_once[1].view(np.float32), rtol=0, atol=2e-6)
    # Alternatives are looked for in the group of the slot that wants them, and there only.
    np.testing.assert_array_equal(grouped[3:6, 2], at_once[3:6, 2])
    assert not grouped[3:6, [0, 1, 4, 5]].any() and at_once[3:6, [0, 1, 4, 5]].any()
