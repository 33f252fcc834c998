import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses.ref_kl import ref_kl_terms


def _terms(trainer, raw, inference, ref, weights=None):
    trainer, raw, inference, ref = (jnp.asarray(values).reshape(1, -1) for values in (trainer, raw, inference, ref))
    weights = jnp.ones_like(trainer) if weights is None else jnp.asarray(weights).reshape(1, -1)
    return ref_kl_terms(trainer, raw, inference, ref, weights, jnp.ones(trainer.shape, bool))


def test_in_expectation_over_own_samples_the_gradient_is_that_of_the_reverse_kl():
    logits, ref_logprobs = jnp.array([0.3, -0.4]), jnp.log(jnp.array([0.2, 0.8]))
    sampled = jax.nn.log_softmax(logits)

    def expected_loss(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(sampled) * _terms(logprobs, logprobs, sampled, ref_logprobs).terms_BT[0])

    def reverse_kl(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - ref_logprobs))

    grad = jax.grad(expected_loss)(logits)
    np.testing.assert_allclose(grad, jax.grad(reverse_kl)(logits), rtol=1e-5)
    probs, log_ratios = np.asarray(jax.nn.softmax(logits)), np.asarray(sampled - ref_logprobs)
    np.testing.assert_allclose(grad, probs * (log_ratios - probs @ log_ratios), rtol=1e-5)
    assert reverse_kl(logits - 0.1 * grad) < reverse_kl(logits)


@pytest.mark.parametrize(("ref_prob", "sign"), [(0.9, -1.0), (0.1, 1.0)])
def test_a_token_that_the_reference_likes_more_is_pushed_up_and_one_it_likes_less_down(ref_prob, sign):
    half = jnp.log(jnp.array(0.5))

    def loss(logprob):
        return jnp.sum(_terms(logprob, half, half, np.log(ref_prob)).terms_BT)

    np.testing.assert_allclose(jax.grad(loss)(half), -np.log(ref_prob / 0.5), rtol=1e-5)
    assert np.sign(jax.grad(loss)(half)) == sign


def test_the_signal_reads_temperature_one_logprobs_and_has_no_gradient():
    def loss(raw):
        return jnp.sum(_terms([-0.7], raw, [-0.7], [-0.2]).terms_BT)

    np.testing.assert_allclose(loss(jnp.array([-1.0])), -0.8, rtol=1e-6)
    assert not jax.grad(loss)(jnp.array([-1.0])).any()


def test_only_tokens_whose_probability_fell_are_dropped_and_they_still_pay_the_squared_log_ratio():
    trainer, inference = np.log([0.8, 0.2, 0.5]), np.log([0.5, 0.5, 0.4])
    terms = _terms(trainer, trainer, inference, np.log([0.6, 0.7, 0.9]), weights=[1.0, 2.0, 1.0])
    assert terms.dropped_low_BT.tolist() == [[False, True, False]]
    assert not terms.dropped_high_BT.any()
    expected = [
        -np.log(0.6 / 0.8) * 1.6 + 1e-3 * np.log(1.6) ** 2,
        2.0 * 1e-3 * np.log(0.4) ** 2,
        -np.log(0.9 / 0.5) * 1.25 + 1e-3 * np.log(1.25) ** 2,
    ]
    np.testing.assert_allclose(terms.terms_BT[0], expected, rtol=1e-5)
