"""What a tool or a template wrote moves no weight: the gradient of its logits is exactly zero, whatever stands in its streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig
from jaxrl.losses import compute_loss, count_members

NUM_IDS = 7


@pytest.mark.parametrize("config", [DefaultLossConfig(), IPOLossConfig()], ids=["default", "ipo"])
@pytest.mark.parametrize("filler", [0.0, -3.0, 1e30])
def test_the_logits_of_what_nobody_sampled_have_no_gradient_and_those_of_replies_do(config, filler):
    prompt_reply_tool_tool_reply = np.array([[3, 1, 4, 1, 5]])
    mask = np.array([[False, True, False, False, True]])
    zeros, streams = np.zeros((1, 5), np.float32), {}
    streams["inference_logprobs"] = np.where(mask, np.float32(-2), np.float32(filler))
    streams["advantages"] = np.where(mask, np.float32(-1), np.float32(filler))

    def loss(logits):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), prompt_reply_tool_tool_reply[:, 1:, None], axis=-1)[..., 0]
        arrays = {
            **streams,
            "trainer_logprobs": jnp.pad(logprobs, ((0, 0), (1, 0))),
            "loss_mask": mask,
            "rl_weights": zeros + 1,
            "ce_weights": zeros,
            "ref_kl_weights": zeros,
            "ref_logprobs": zeros,
            "segment_ids": np.ones((1, 5), np.int32),
        }
        return compute_loss(arrays, count_members(arrays), config)[0]

    gradient = np.asarray(jax.grad(loss)(0.1 * jax.random.normal(jax.random.key(0), (1, 5, NUM_IDS))))
    # Logits at position t predict token t + 1: the two replies are predicted at 0 and 3.
    assert not gradient[0, [1, 2, 4]].any()
    assert (np.abs(gradient[0, [0, 3]]).max(axis=-1) > 1e-3).all()
