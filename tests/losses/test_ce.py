import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.losses.ce import ce_terms


def test_the_gradient_of_two_logits_is_the_weighted_cross_entropy_gradient():
    logits, token, weight = jnp.array([0.3, -0.4]), 0, 0.5

    def loss(logits):
        return jnp.sum(ce_terms(jax.nn.log_softmax(logits)[token].reshape(1, 1), jnp.array([[weight]])))

    grad = jax.grad(loss)(logits)
    np.testing.assert_allclose(grad, weight * (np.asarray(jax.nn.softmax(logits)) - np.eye(2)[token]), rtol=1e-6)
    assert jax.nn.log_softmax(logits - 0.1 * grad)[token] > jax.nn.log_softmax(logits)[token]


def test_weights_scale_terms_and_a_zero_weight_gives_none():
    terms = ce_terms(jnp.array([[-0.1, -0.5, -0.2]]), jnp.array([[0.1, 0.0, -1.0]]))
    np.testing.assert_allclose(terms, [[0.01, 0.0, -0.2]], rtol=1e-6)
