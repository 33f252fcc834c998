"""Allocation and prompt insertion."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.engine.cache import cache_bytes, init_cache, insert_prompts
from jaxrl.models.decode import LayerKV
from tests.engine.tiny import SPEC


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
