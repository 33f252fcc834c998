import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxrl.models.layers import MLP, Embedding, Linear, RMSNorm, apply_rope, rms_norm, rope_frequencies, rope_tables
from jaxrl.models.spec import RopeScaling


def test_rms_norm_divides_by_the_root_mean_square_then_scales():
    y = rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(y, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]], rtol=1e-6)


def test_rms_norm_of_zeros_is_zeros_with_a_finite_gradient():
    value, grad = jax.value_and_grad(lambda x: rms_norm(x, jnp.ones(4), 1e-6).sum())(jnp.zeros((2, 4)))
    assert value == 0.0
    assert np.all(np.isfinite(grad))


def test_rms_norm_gradients_agree_with_differences():
    x = jax.random.normal(jax.random.key(0), (3, 8))
    check_grads(lambda x, scale: rms_norm(x, scale, 1e-6), (x, jnp.linspace(0.5, 1.5, 8)), order=1, modes="rev", rtol=0.02)


def test_rms_norm_of_bfloat16_is_the_float32_norm_rounded_once():
    x = jax.random.normal(jax.random.key(1), (4, 256)).astype(jnp.bfloat16)
    scale = jnp.linspace(0.5, 1.5, 256)
    expected = rms_norm(x.astype(jnp.float32), scale, 1e-6).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, scale, 1e-6), expected)


def test_rope_turns_the_pair_of_dimension_i_and_i_plus_half_by_position_over_wavelength():
    cos, sin = rope_tables(jnp.array([[0, 3]]), 4, 100.0)
    x = jnp.zeros((1, 1, 2, 4)).at[..., 1].set(1.0)
    turned = apply_rope(x, cos, sin)
    np.testing.assert_allclose(turned[0, 0, 0], [0, 1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(turned[0, 0, 1], [0, math.cos(0.3), 0, math.sin(0.3)], rtol=1e-6)


def test_llama_3_keeps_short_wavelengths_stretches_long_ones_and_blends_between():
    scaling = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    # Wavelengths of 6.3, 29.7, 140 and 664 positions; 32 / 29.7 = 1.07703 lies a share of 0.02568 of the way from 1 to 4.
    kept, blended, *stretched = rope_frequencies(8, 500.0, scaling)
    assert kept == 1.0
    assert blended == pytest.approx((0.02568 + (1 - 0.02568) / 4) * 500**-0.25, rel=1e-5)
    np.testing.assert_allclose(stretched, [500**-0.5 / 4, 500**-0.75 / 4], rtol=1e-7)
    cos, sin = rope_tables(jnp.array([[40]]), 8, 500.0, scaling)
    np.testing.assert_allclose(jnp.arctan2(sin, cos)[0, 0, 2:], [40 * stretched[0], 40 * stretched[1]], rtol=1e-6)


def test_a_scaling_of_factor_one_changes_no_frequency():
    scaling = RopeScaling(factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    np.testing.assert_allclose(rope_frequencies(128, 5e5, scaling), rope_frequencies(128, 5e5), rtol=1e-7)


@given(first=st.integers(0, 50), second=st.integers(0, 50), shift=st.integers(0, 500))
@settings(max_examples=20, deadline=None)
def test_rope_products_depend_on_the_distance_only(first, second, shift):
    q, k = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    x = jnp.asarray(np.stack([q, k])[None, None])

    def product(positions: list[int]) -> float:
        turned = apply_rope(x, *rope_tables(jnp.array([positions]), 8, 1000.0))
        return float(turned[0, 0, 0] @ turned[0, 0, 1])

    np.testing.assert_allclose(product([first, second]), product([first + shift, second + shift]), atol=2e-4)


def test_linear_multiplies_by_in_by_out_and_adds_its_bias():
    linear = Linear(2, 3, has_bias=True, rngs=nnx.Rngs(0))
    linear.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    linear.bias[...] = jnp.array([0.5, 0.0, -0.5])
    np.testing.assert_array_equal(linear(jnp.array([[1.0, 10.0]])), [[41.5, 52.0, 62.5]])


def test_a_token_id_outside_the_table_is_nan_and_cannot_go_unnoticed():
    x = Embedding(4, 2, rngs=nnx.Rngs(0))(jnp.array([[3, 4]]), jnp.float32, None)
    assert np.isfinite(x[0, 0]).all()
    assert np.isnan(x[0, 1]).all()


def test_repeated_tokens_sum_their_gradient_in_float32_under_bfloat16():
    embedding = Embedding(2, 1, rngs=nnx.Rngs(0))
    graph, params = nnx.split(embedding)
    tokens = jnp.zeros((1, 1000), jnp.int32)
    grads = jax.grad(lambda p: nnx.merge(graph, p)(tokens, jnp.bfloat16, None).astype(jnp.float32).sum())(params)
    assert grads["weight"][...][0, 0] == 1000.0


def test_the_feed_forward_gates_with_silu():
    mlp = MLP(1, 1, rngs=nnx.Rngs(0))
    for linear, value in ((mlp.gate_proj, 2.0), (mlp.up_proj, 3.0), (mlp.down_proj, 5.0)):
        linear.kernel[...] = jnp.full((1, 1), value)
    np.testing.assert_allclose(mlp(jnp.ones((1, 1))), [[5.0 * 3.0 * 2.0 / (1 + math.exp(-2.0))]], rtol=1e-6)


def test_a_norm_module_starts_as_the_plain_norm():
    x = jnp.array([[3.0, 4.0]])
    np.testing.assert_array_equal(RMSNorm(2, 0.0)(x), rms_norm(x, jnp.ones(2), 0.0))
