import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from jaxrl.models.attention import masked_attention, visible_keys

SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]])


def random_qkv(heads: int = 4, kv_heads: int = 2, length: int = 6, size: int = 4) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, n, length, size)) for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True))


def test_a_query_sees_the_earlier_tokens_of_its_own_segment_and_itself():
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(visible_keys(SEGMENTS)[0].astype(int), expected)


def test_without_a_preference_attention_is_the_mean_of_the_visible_values():
    _, k, v = random_qkv()
    out = masked_attention(jnp.zeros((1, 4, 6, 4)), k, v, visible_keys(SEGMENTS))
    np.testing.assert_allclose(out[0, 0, 2], v[0, 0, :3].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(out[0, 0, 4], v[0, 0, 3:5].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(out[0, 3, 5], v[0, 1, 5], rtol=1e-5)


def test_two_keys_are_weighed_by_the_sigmoid_of_their_scaled_score_difference():
    q = jnp.array([[[[0.0] * 4, [2.0, 0, 0, 0]]]])
    k = jnp.array([[[[0.0] * 4, [3.0, 0, 0, 0]]]])
    v = jnp.array([[[[0.0] * 4, [1.0] * 4]]])
    out = masked_attention(q, k, v, visible_keys(jnp.ones((1, 2), jnp.int32)))
    np.testing.assert_allclose(out[0, 0, 1], np.full(4, 1 / (1 + np.exp(-3.0))), rtol=1e-6)


def test_query_head_h_reads_key_value_head_h_over_group_size():
    q, k, v = random_qkv()
    mask = visible_keys(SEGMENTS)
    grouped = masked_attention(q, k, v, mask)
    for head in range(4):
        alone = masked_attention(q[:, head : head + 1], k[:, head // 2 : head // 2 + 1], v[:, head // 2 : head // 2 + 1], mask)
        np.testing.assert_allclose(grouped[:, head : head + 1], alone, rtol=1e-5, atol=1e-6)


def test_a_broken_value_reaches_the_queries_that_see_it_and_no_others():
    q, k, v = random_qkv()
    mask = visible_keys(SEGMENTS)
    clean = masked_attention(q, k, v, mask)
    for broken in (np.nan, np.inf):
        out = masked_attention(q, k.at[0, :, 1].set(jnp.nan), v.at[0, :, 1, 2].set(broken), mask)
        np.testing.assert_array_equal(out[0, :, [0, 3, 4, 5]], clean[0, :, [0, 3, 4, 5]])
        assert np.isnan(out[0, :, 1:3]).all()


def test_an_infinite_value_alone_is_not_hidden_from_its_own_segment():
    q, k, v = random_qkv()
    out = masked_attention(q, k, v.at[0, 0, 3, 0].set(jnp.inf), visible_keys(SEGMENTS))
    assert np.isnan(out[0, :2, 3:5]).all()
    assert np.isfinite(out[0, 2:]).all()


def test_no_gradient_crosses_from_one_segment_into_another():
    q, k, v = random_qkv()
    mask = visible_keys(SEGMENTS)
    grads = jax.grad(lambda *qkv: jnp.sum(jnp.sin(masked_attention(*qkv, mask)[:, :, 3:5])), argnums=(0, 1, 2))(q, k, v)
    for grad in grads:
        np.testing.assert_array_equal(grad[:, :, [0, 1, 2, 5]], 0.0)
        assert np.abs(grad[:, :, 3:5]).max() > 1e-3


def test_gradients_agree_with_differences():
    mask = visible_keys(SEGMENTS)
    check_grads(lambda *qkv: masked_attention(*qkv, mask), random_qkv(), order=1, modes="rev", rtol=0.02)


def test_under_bfloat16_scores_and_softmax_keep_differences_that_bfloat16_cannot_hold():
    q = jnp.array([[[[0.0] * 4, [16.0, 1.0, 0.0, 0.0]]]], jnp.bfloat16)
    k = jnp.array([[[[16.0, 0.0, 0.0, 0.0], [16.0, 1.0, 0.0, 0.0]]]], jnp.bfloat16)
    v = jnp.array([[[[0.0] * 4, [1.0] * 4]]], jnp.bfloat16)
    out = masked_attention(q, k, v, visible_keys(jnp.ones((1, 2), jnp.int32)))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out[0, 0, 1].astype(jnp.float32), np.full(4, 1 / (1 + np.exp(-0.5))), rtol=4e-3)
