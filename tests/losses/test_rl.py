import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig
from jaxrl.losses.rl import RL_LOSSES, RLInputs, default_rl, ipo_rl, rl_terms


def _inputs(trainer_probs, inference_probs, advantages, weights=1.0):
    shape = (1, len(trainer_probs))
    return RLInputs(
        trainer_logprobs_BT=jnp.log(jnp.array([trainer_probs])),
        inference_logprobs_BT=jnp.log(jnp.array([inference_probs])),
        advantages_BT=jnp.array([advantages]),
        weights_BT=jnp.full(shape, weights),
        members_BT=jnp.ones(shape, bool),
        segment_ids_BT=jnp.ones(shape, jnp.int32),
    )


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_on_policy_the_gradient_of_two_logits_is_minus_the_advantage_times_the_score(advantage):
    logits, token = jnp.array([0.3, -0.4]), 1
    sampled_logprob = jax.nn.log_softmax(logits)[token]

    def loss(logits):
        inputs = _inputs([1.0], [1.0], [advantage])._replace(
            trainer_logprobs_BT=jax.nn.log_softmax(logits)[token].reshape(1, 1), inference_logprobs_BT=sampled_logprob.reshape(1, 1)
        )
        return jnp.sum(default_rl(inputs, DefaultLossConfig()).terms_BT)

    grad = jax.grad(loss)(logits)
    score = np.eye(2)[token] - np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(grad, -advantage * score, rtol=1e-6)
    # One step down the gradient makes a good token likelier and a bad one less likely.
    moved = jax.nn.log_softmax(logits - 0.1 * grad)[token] - sampled_logprob
    assert np.sign(moved) == np.sign(advantage)


def test_the_default_loss_drops_only_tokens_that_moved_far_along_their_advantage():
    # Rose with A > 0, fell with A < 0, fell with A = 0; then the three that moved the other way or little.
    inputs = _inputs([0.8, 0.2, 0.2, 0.2, 0.8, 0.6], [0.5] * 6, [1.0, -1.0, 0.0, 1.0, -1.0, 1.0])
    terms = default_rl(inputs, DefaultLossConfig(kl_tau=0.0))
    assert terms.dropped_high_BT.tolist() == [[True, False, False, False, False, False]]
    assert terms.dropped_low_BT.tolist() == [[False, True, True, False, False, False]]
    np.testing.assert_allclose(terms.terms_BT, [[0.0, 0.0, 0.0, -0.4, 1.6, -1.2]], rtol=1e-5)


def test_the_ipo_loss_drops_by_distance_whatever_the_advantage():
    inputs = _inputs([0.65, 0.65, 0.35, 0.35, 0.55], [0.5] * 5, [1.0, -1.0, 1.0, -1.0, 1.0])
    terms = ipo_rl(inputs, IPOLossConfig(kl_tau=0.0))
    assert terms.dropped_high_BT.tolist() == [[True, True, False, False, False]]
    assert terms.dropped_low_BT.tolist() == [[False, False, True, True, False]]
    np.testing.assert_allclose(terms.terms_BT, [[0.0, 0.0, 0.0, 0.0, -1.1]], rtol=1e-5)


def test_the_weight_scales_the_policy_term_and_the_regulariser_of_dropped_tokens_too():
    once, twice = (default_rl(_inputs([0.8, 0.6], [0.5, 0.5], [1.0, 1.0], weights=w), DefaultLossConfig(kl_tau=0.5)) for w in (1.0, -2.0))
    np.testing.assert_allclose(once.terms_BT, [[0.5 * np.log(1.6) ** 2, -1.2 + 0.5 * np.log(1.2) ** 2]], rtol=1e-5)
    np.testing.assert_allclose(twice.terms_BT, -2.0 * once.terms_BT, rtol=1e-6)


def test_the_type_of_the_configuration_selects_the_loss():
    inputs = _inputs([0.65], [0.5], [-1.0])
    assert not rl_terms(inputs, DefaultLossConfig()).dropped_high_BT.any()
    assert rl_terms(inputs, IPOLossConfig()).dropped_high_BT.all()
    assert set(RL_LOSSES) == {DefaultLossConfig().type, IPOLossConfig().type}
