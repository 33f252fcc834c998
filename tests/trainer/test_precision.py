"""Bfloat16 inside a step, float32 masters outside: what small updates and rounded products do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.trainer.state import Accumulator
from jaxrl.trainer.step import densify
from tests.trainer.tiny import make_batch, make_config, make_programs, make_sample, make_state, to_host

NUM_STEPS, LR = 20, 1e-5
OPTIMIZER = {"lr": LR, "weight_decay": 0.0, "max_grad_norm": 1e6, "schedule": {"type": "constant"}}


@pytest.mark.parametrize(("param_dtype", "moved"), [("float32", NUM_STEPS * LR), ("bfloat16", 0.0)])
def test_updates_of_one_hundred_thousandth_add_up_in_float32_masters_and_are_lost_in_bfloat16_ones(param_dtype, moved):
    programs = make_programs(make_config(param_dtype=param_dtype, compute_dtype="bfloat16", optimizer=OPTIMIZER))
    state = make_state(programs)
    for _ in range(NUM_STEPS):
        # The same gradient of one everywhere at each step: every update of AdamW is then the learning rate.
        zeros = programs.zero_accumulator()
        totals = zeros.metrics.totals | {"tokens/rl": jnp.float32(1)}
        grads = jax.tree.map(jnp.ones_like, zeros.grads)
        state, _ = programs.apply(state, Accumulator(grads, zeros.metrics._replace(totals=totals)))
    scales = to_host(state.params["final_norm"]["scale"]).astype(np.float64)
    np.testing.assert_allclose(1.0 - scales, moved, atol=2e-6)


def test_a_step_in_bfloat16_finds_the_logprobs_of_float32_to_its_three_digits():
    logprobs = []
    for compute_dtype in ("float32", "bfloat16"):
        programs = make_programs(make_config(compute_dtype=compute_dtype))
        batch = make_batch([make_sample(i, 12) for i in range(4)], programs.config)
        denominators = programs.psum_denominators(batch.member_counts)
        arrays = densify(batch.micro_batches[0])
        logprobs.append(np.asarray(programs.grad_step(make_state(programs), programs.zero_accumulator(), arrays, denominators)[1]))
    difference = np.abs(logprobs[1] - logprobs[0])
    # Eight bits of a product are 0.4 %; logits here are of order one, and a bfloat16 step that fell back to float32 would show 0.
    assert 0 < difference.max() < 0.03
