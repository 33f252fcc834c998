import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.losses.importance import policy_terms, probability_gap


def test_the_probability_gap_is_exact_at_extremes_and_carries_no_gradient():
    trainer, inference = jnp.array([[0.0, -800.0, -0.5]]), jnp.array([[-800.0, 0.0, -0.5]])
    np.testing.assert_array_equal(probability_gap(trainer, inference), [[1.0, -1.0, 0.0]])
    assert not jax.grad(lambda logprobs: jnp.sum(probability_gap(logprobs, inference)))(trainer).any()


def test_the_ratio_of_a_kept_token_is_differentiated_and_not_clipped():
    log_ratio = jnp.array([[np.log(3.0), np.log(5.0)]], jnp.float32)

    def loss(log_ratio):
        return jnp.sum(policy_terms(log_ratio, jnp.array([[1.0, -2.0]]), jnp.array([[1.0, 0.5]]), jnp.array([[True, True]]), kl_tau=0.0))

    np.testing.assert_allclose(loss(log_ratio), -3.0 + 0.5 * 2.0 * 5.0, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(log_ratio), [[-3.0, 5.0]], rtol=1e-6)
