"""Schedules against golden numbers, and what AdamW decays and clips."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import OptimizerConfig
from jaxrl.trainer.optimizer import build_optimizer, build_schedule, decay_mask
from tests.trainer.tiny import make_params

GOLDEN = Path(__file__).parents[1] / "golden" / "trainer" / "schedule_cases.json"
CASES = json.loads(GOLDEN.read_text())["schedule_cases"]


def rates(lr: float, max_steps: int, num_steps: int | None = None, *, is_compiled: bool = True, **schedule: object) -> list[float]:
    """The rate of every step, computed under jit as a step does, or op by op."""
    rate = build_schedule(OptimizerConfig(lr=lr, schedule=schedule), max_steps)
    rate = jax.jit(rate) if is_compiled else rate
    return [float(rate(jnp.int32(k))) for k in range(num_steps or max_steps)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['type']}_{i}" for i, case in enumerate(CASES)])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
def test_every_step_uses_the_golden_learning_rate(case, is_compiled):
    case = dict(case)
    expected = case.pop("lr_used_by_step_1_based")
    found = rates(case.pop("lr"), case.pop("max_steps"), is_compiled=is_compiled, **case)
    np.testing.assert_allclose(found, expected, atol=1e-9, rtol=1e-6)


def test_both_ends_of_a_linear_schedule_without_min_lr_are_a_hundred_millionth_of_the_peak_and_not_zero():
    found = rates(1e-3, 6, type="linear", warmup_steps=2, decay_steps=2)
    assert found[0] == pytest.approx(1e-11, rel=1e-6) and found[-1] == pytest.approx(1e-11, rel=1e-6)


def test_one_decay_step_drops_to_the_floor_on_the_last_step():
    assert rates(1.0, 3, type="linear", warmup_steps=0, decay_steps=1, min_lr=0.25) == [1.0, 1.0, 0.25]


def test_a_decay_over_the_whole_run_starts_at_the_peak_and_ends_at_the_floor():
    assert rates(1.0, 3, type="linear", warmup_steps=0, decay_steps=3, min_lr=0.5) == [1.0, 0.75, 0.5]


def test_a_constant_schedule_warms_up_in_equal_parts_from_the_first_step():
    assert rates(1.0, 6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(1.0, 2, type="constant", warmup_steps=1) == [1.0, 1.0]
    assert rates(0.5, 2, type="constant") == [0.5, 0.5]


def test_a_cosine_without_warmup_starts_at_the_peak_and_ends_just_above_the_minimum():
    found = rates(1.0, 4, type="cosine", warmup_steps=0, min_lr=0.1)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.1 + 0.9 * (1 + np.cos(np.pi * 3 / 4)) / 2, rel=1e-6)


@pytest.mark.parametrize("schedule", [{"type": "linear", "min_lr": 0.1}, {"type": "cosine", "min_lr": 0.1}])
def test_steps_beyond_the_run_stay_at_the_minimum(schedule):
    assert rates(1.0, 30, 35, **schedule)[-4:] == pytest.approx([0.1] * 4, rel=1e-6)


def test_matrices_decay_and_norms_and_biases_do_not():
    mask = jax.tree_util.tree_flatten_with_path(decay_mask(make_params()))[0]
    decayed = {jax.tree_util.keystr(path, simple=True, separator="/") for path, is_decayed in mask if is_decayed}
    attention = {f"layers/attention/{name}_proj/kernel" for name in "qkvo"}
    assert decayed == {
        "embed/weight",
        *attention,
        *(f"layers/mlp/{name}_proj/kernel" for name in ("gate", "up", "down")),
    }
    assert decay_mask({"layers": {"bias": jnp.ones((2, 8))}}) == {"layers": {"bias": False}}


def test_the_first_update_is_the_sign_of_the_clipped_gradient_plus_decay():
    config = OptimizerConfig(max_grad_norm=0.5, weight_decay=0.1, eps=1e-3)
    optimizer = build_optimizer(config)
    params = {"kernel": jnp.array([[2.0, -4.0]]), "layers": {"scale": jnp.ones((2, 1))}}
    grads = {"kernel": jnp.array([[3.0, -4.0]]), "layers": {"scale": jnp.zeros((2, 1))}}
    direction, _ = optimizer.update(grads, optimizer.init(params), params, grad_norm=jnp.float32(5.0))
    # Norm 5 is scaled to 0.5; bias-corrected Adam's first step is g / (|g| + eps); only the matrix decays, by 0.1 * p.
    clipped = np.array([[0.3, -0.4]])
    np.testing.assert_allclose(
        direction["kernel"], clipped / (np.abs(clipped) + 1e-3) + 0.1 * params["kernel"], rtol=1e-5
    )
    np.testing.assert_array_equal(direction["layers"]["scale"], 0.0)
