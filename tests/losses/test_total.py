from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig, MeshConfig
from jaxrl.losses import compute_loss, count_members, finish_metrics, loss_and_sums, merge_metrics
from jaxrl.models.mesh import batch_sharding, build_mesh
from tests.losses.cases import GOLDEN, LENGTH, loss_config, micro_batches, pack_row, random_arrays, without_context

# Every test shares these shapes and compiled programs: compiling is what takes time here.
CASES = {case["name"]: case for case in GOLDEN["loss_cases"]}
CONFIG = DefaultLossConfig()
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)


def _value_and_grad(trainer_logprobs, arrays, denominators, config):
    def loss(logprobs):
        return loss_and_sums({**arrays, "trainer_logprobs": logprobs}, denominators, config)

    return jax.value_and_grad(loss, has_aux=True)(trainer_logprobs)


_compiled = jax.jit(_value_and_grad, static_argnames="config")


@partial(jax.jit, static_argnames="config")
def _all_grads(arrays, denominators, config=CONFIG):
    """Total, metric sums and the gradients of both kinds of trainer logprobs."""

    def loss(logprobs, raw):
        return loss_and_sums({**arrays, "trainer_logprobs": logprobs, "trainer_logprobs_raw": raw}, denominators, config)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        jnp.asarray(arrays["trainer_logprobs"]), jnp.asarray(arrays["trainer_logprobs_raw"])
    )


CASES_BY_DTYPE = [(name, np.float64) for name in CASES] + [(name, np.float32) for name in CASES if name != "rl_threshold_is_strict"]
"""The gap of the case left out equals the threshold in float64 only."""


@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize(("name", "dtype"), CASES_BY_DTYPE)
def test_every_golden_case_has_its_counts_components_total_and_gradient(name, dtype, is_compiled):
    case, config = CASES[name], loss_config(CASES[name])
    expected = case["expected"]
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == np.float64 else {"rtol": 2e-5, "atol": 1e-6}
    run = _compiled if is_compiled else _value_and_grad
    with jax.enable_x64(dtype == np.float64):
        batches, gradients = micro_batches(case, dtype)
        counts = sum(np.asarray(count_members(arrays)) for arrays in batches)
        assert counts.tolist() == list(expected["member_counts"].values())
        denominators = np.maximum(counts, 1).astype(dtype)
        total, metrics = 0.0, None
        for arrays, gradient in zip(batches, gradients, strict=True):
            (value, sums), grad = run(jnp.asarray(arrays["trainer_logprobs"]), arrays, denominators, config)
            assert value.dtype == grad.dtype == dtype
            np.testing.assert_allclose(grad, gradient, **tolerance)
            total += float(value)
            metrics = sums if metrics is None else merge_metrics(metrics, sums)
        metrics = finish_metrics(metrics)
        np.testing.assert_allclose(total, expected["total"], **tolerance)
        np.testing.assert_allclose(metrics["loss/total"], expected["total"], **tolerance)
        for component, value in expected["components"].items():
            np.testing.assert_allclose(metrics[f"loss/{component}"], value, **tolerance)
            assert metrics[f"tokens/{component}"] == expected["member_counts"][component]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case["expected"]["metrics_per_sequence"]) == 1])
def test_metrics_of_a_single_sequence_are_those_of_the_golden_case(name):
    with jax.enable_x64(True):
        (arrays,), _ = micro_batches(CASES[name])
        (_, sums), _ = _compiled(arrays["trainer_logprobs"], arrays, np.ones(3), loss_config(CASES[name]))
        metrics = finish_metrics(sums)
    expected = CASES[name]["expected"]["metrics_per_sequence"][0]
    ours = {
        "is_masked": "trust_region/rl/dropped_frac",
        "is_masked_high": "trust_region/rl/dropped_high_frac",
        "masked_mismatch_kl": "mismatch/kl/dropped/mean",
        "unmasked_mismatch_kl": "mismatch/kl/kept/mean",
        "nll": "ce/nll/mean",
        "ref_kl": "ref_kl/log_ratio/mean",
        "ref_kl/is_masked": "trust_region/ref_kl/dropped_frac",
    }
    # A sampled log-ratio beyond 20 is cut in metrics; the golden case has exactly 20.
    for theirs in expected.keys() & ours.keys():
        np.testing.assert_allclose(metrics[ours[theirs]], expected[theirs], rtol=1e-9, atol=1e-12, err_msg=theirs)


def test_metrics_weigh_tokens_and_not_sequences():
    (arrays,), _ = micro_batches(CASES["metrics_weighting"], np.float32)
    _, metrics = compute_loss(arrays, count_members(arrays), CONFIG)
    assert metrics["trust_region/rl/dropped_frac"] == pytest.approx(2 / 5)
    per_sequence = CASES["metrics_weighting"]["expected"]["metrics_mean_of_sequences"]["is_masked"]
    assert per_sequence == pytest.approx(0.625)


def test_ce_and_the_reference_signal_use_temperature_one_and_the_ratio_does_not():
    (case,) = GOLDEN["raw_cases"]
    with jax.enable_x64(True):
        arrays = pack_row([case["inputs"]])
        arrays["trainer_logprobs_raw"] = np.pad(case["inputs"]["trainer_logprobs_raw"], (0, LENGTH - 4))[None]
        denominators = np.asarray(count_members(arrays))
        assert denominators.tolist() == list(case["expected"]["denominators"].values())
        (total, sums), (grad, grad_raw) = _all_grads(arrays, denominators, loss_config(case))
        expected = case["expected"]
        np.testing.assert_allclose(total, expected["total"], rtol=1e-12)
        for component, value in expected["components"].items():
            np.testing.assert_allclose(sums.totals[f"loss/{component}"], value, rtol=1e-12)
        np.testing.assert_allclose(grad[0, :4], expected["grad_trainer_logprobs"], rtol=1e-12)
        np.testing.assert_allclose(grad_raw[0, :4], expected["grad_trainer_logprobs_raw"], rtol=1e-12)


def test_the_nll_of_observations_is_their_mean_surprise_whatever_they_weigh_and_they_are_no_rl_members():
    """Prompt, reply, two observations of weights 0.1 and 0.4, reply; logprobs at temperature 1 beside those at the sampling one."""
    arrays = {name: np.zeros((1, LENGTH), np.float32) for name in ("inference_logprobs", "ref_logprobs", "advantages", "ref_kl_weights")}
    arrays |= {"trainer_logprobs": np.zeros((1, LENGTH), np.float32), "rl_weights": np.ones((1, LENGTH), np.float32)}
    for name, values in {
        "trainer_logprobs": [0, -0.25, -9, -9, -0.5],
        "trainer_logprobs_raw": [0, -1, -2, -4, -1],
        "inference_logprobs": [0, -0.25, 0, 0, -0.5],
        "advantages": [0, 1, 0, 0, 1],
        "ce_weights": [0, 0, 0.1, 0.4, 0],
    }.items():
        arrays[name] = np.pad(np.asarray(values, np.float32), (0, LENGTH - 5))[None]
    arrays["loss_mask"] = np.arange(LENGTH)[None] % 3 == 1
    arrays["loss_mask"][0, 5:] = False
    arrays["segment_ids"] = (np.arange(LENGTH) < 5).astype(np.int32)[None]
    counts = np.asarray(count_members(arrays))
    assert counts.tolist() == [2, 2, 0]
    _, metrics = compute_loss(arrays, counts, CONFIG)
    assert metrics["ce/nll/mean"] == pytest.approx(3.0), "(2 + 4) / 2"
    assert metrics["loss/ce"] == pytest.approx(0.9), "(0.1 * 2 + 0.4 * 4) / 2"
    assert metrics["loss/rl"] == pytest.approx(-1.0), "the two replies alone"


def test_without_raw_logprobs_the_tempered_ones_are_used_for_ce_and_the_signal():
    (arrays,), _ = micro_batches(CASES["disjoint_components_one_sequence"], np.float32)
    explicit = {**arrays, "trainer_logprobs_raw": arrays["trainer_logprobs"]}
    total, metrics = compute_loss(arrays, count_members(arrays), CONFIG)
    assert metrics["loss/ce"] != 0 and metrics["loss/ref_kl"] != 0
    assert total == compute_loss(explicit, count_members(arrays), CONFIG)[0]


def test_no_members_at_all_give_exactly_zero_and_an_exactly_zero_gradient():
    arrays = random_arrays(1)
    arrays["loss_mask"][:] = False
    arrays["ce_weights"][:] = 0.0
    arrays["ref_kl_weights"][:] = 0.0
    for name in ("trainer_logprobs", "trainer_logprobs_raw", "inference_logprobs", "ref_logprobs", "advantages", "rl_weights", "entropy"):
        arrays[name][:] = np.nan
    (total, sums), grads = _all_grads(arrays, np.zeros(3, np.float32))
    assert float(total) == 0.0
    assert all(float(value) == 0.0 for value in finish_metrics(sums).values())
    assert all(np.array_equal(grad, np.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("config", [CONFIG, IPOLossConfig()], ids=["default", "ipo"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_every_masked_slot_changes_no_bit_of_loss_gradient_or_metric(garbage, config):
    arrays = random_arrays(2)
    out = without_context(arrays["segment_ids"])
    rl = arrays["loss_mask"] & (arrays["rl_weights"] != 0) & ~out
    ce, ref_kl = ((arrays[name] != 0) & ~out for name in ("ce_weights", "ref_kl_weights"))
    assert rl.sum() > 5 and ce.sum() > 5 and ref_kl.sum() > 5
    unread = {
        "trainer_logprobs": ~(rl | ref_kl),
        "trainer_logprobs_raw": ~(ce | ref_kl),
        "inference_logprobs": ~(rl | ref_kl),
        "ref_logprobs": ~ref_kl,
        "advantages": ~rl,
        "rl_weights": out | ~arrays["loss_mask"],
        "ce_weights": out,
        "ref_kl_weights": out,
        "entropy": out | ~arrays["loss_mask"],
    }
    spoilt = {**arrays, **{name: np.where(mask, np.float32(garbage), arrays[name]) for name, mask in unread.items()}}
    denominators = np.asarray(count_members(arrays), np.float32)
    assert denominators.tolist() == [rl.sum(), ce.sum(), ref_kl.sum()]
    assert np.array_equal(count_members(spoilt), denominators)
    clean_run, spoilt_run = _all_grads(arrays, denominators, config), _all_grads(spoilt, denominators, config)
    for clean, dirty in zip(jax.tree.leaves(clean_run), jax.tree.leaves(spoilt_run), strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(clean, dirty)


def test_garbage_in_padding_is_harmless_op_by_op_too():
    # Compiled, XLA turns a product with a mask into a select: only an eager run tells the two apart.
    (arrays,), _ = micro_batches(CASES["overlap_rl_and_ce"], np.float32)
    is_padding = arrays["segment_ids"] == 0
    spoilt = {
        name: np.where(is_padding, np.float32(np.nan), values) if values.dtype == np.float32 else values for name, values in arrays.items()
    }
    assert np.isnan(spoilt["advantages"]).any()
    clean_run, spoilt_run = (_value_and_grad(jnp.asarray(each["trainer_logprobs"]), each, np.ones(3), CONFIG) for each in (arrays, spoilt))
    jax.tree.map(np.testing.assert_array_equal, clean_run, spoilt_run)


def _tokens(trainer, inference, *, advantages=1.0, ref_logprobs=-0.5, rl_weights=1.0, ref_kl_weights=0.0):
    """One sample: a context token, then tokens with the given logprobs."""
    num = len(trainer)

    def stream(values):
        return [0.0, *np.broadcast_to(values, num)]

    return pack_row(
        [
            {
                "trainer_logprobs": [0.0, *trainer],
                "inference_logprobs": [0.0, *inference],
                "ref_logprobs": stream(ref_logprobs),
                "advantages": stream(advantages),
                "loss_mask": [False] + [True] * num,
                "rl_weights": stream(rl_weights),
                "ce_weights": stream(0.0),
                "ref_kl_weights": stream(ref_kl_weights),
            }
        ],
        np.float32,
    )


@pytest.mark.parametrize("log_ratio", [90.0, 799.5])
def test_a_dropped_token_with_an_overflowing_ratio_only_pays_its_squared_log_ratio(log_ratio):
    arrays = _tokens([-0.5, -0.5108256], [-0.5 - log_ratio, -0.6931472])
    (total, sums), grad = _compiled(arrays["trainer_logprobs"], arrays, np.array([2, 1, 1], np.float32), CONFIG)
    np.testing.assert_allclose(total, (1e-3 * log_ratio**2 - 1.2 + 1e-3 * np.log(1.2) ** 2) / 2, rtol=1e-5)
    np.testing.assert_allclose(grad[0, :3], [0.0, 1e-3 * log_ratio, (-1.2 + 2e-3 * np.log(1.2)) / 2], rtol=1e-5)
    metrics = finish_metrics(sums)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["mismatch/ratio/max"] == pytest.approx(np.exp(20.0), rel=1e-5)


@pytest.mark.parametrize(
    "arrays",
    [
        _tokens([-0.5], [-800.0], advantages=0.0),
        _tokens([-0.5], [-800.0], advantages=-1.0, rl_weights=0.0, ref_logprobs=-0.5, ref_kl_weights=1.0),
    ],
    ids=["zero_advantage", "zero_signal"],
)
def test_a_kept_token_without_credit_has_no_policy_term_however_large_its_ratio(arrays):
    (total, _), grad = _compiled(arrays["trainer_logprobs"], arrays, np.ones(3, np.float32), CONFIG)
    np.testing.assert_allclose(total, 1e-3 * 799.5**2, rtol=1e-5)
    np.testing.assert_allclose(grad[0, :2], [0.0, 2e-3 * 799.5], rtol=1e-5)


def test_a_switched_off_policy_term_does_not_touch_the_ratio():
    arrays = _tokens([-3.0], [-800.0])
    (total, _), grad = _compiled(arrays["trainer_logprobs"], arrays, np.ones(3, np.float32), DefaultLossConfig(adv_tau=0.0))
    np.testing.assert_allclose(total, 1e-3 * 797.0**2, rtol=1e-5)
    assert np.isfinite(grad).all()


def test_the_first_token_of_a_segment_and_padding_are_never_members():
    arrays = random_arrays(3)
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        arrays[name][:] = 1.0
    arrays["loss_mask"][:] = True
    num_trained = int((~without_context(arrays["segment_ids"])).sum())
    assert 0 < num_trained < arrays["segment_ids"].size
    counts = count_members(arrays)
    assert counts.dtype == jnp.int32 and counts.tolist() == [num_trained] * 3
    _, (grad, grad_raw) = _all_grads(arrays, counts.astype(jnp.float32))
    assert not grad[without_context(arrays["segment_ids"])].any()
    assert not grad_raw[without_context(arrays["segment_ids"])].any()


def test_mismatch_is_measured_on_rl_and_ref_kl_members_only():
    arrays = random_arrays(4)
    out = without_context(arrays["segment_ids"])
    compared = ((arrays["loss_mask"] & (arrays["rl_weights"] != 0)) | (arrays["ref_kl_weights"] != 0)) & ~out
    (_, sums), _ = _all_grads(arrays, np.asarray(count_members(arrays), np.float32))
    metrics = finish_metrics(sums)
    log_ratio = (arrays["trainer_logprobs"] - arrays["inference_logprobs"])[compared]
    np.testing.assert_allclose(metrics["mismatch/kl/mean"], np.mean(np.exp(log_ratio) - log_ratio - 1), rtol=1e-5)
    np.testing.assert_allclose(metrics["mismatch/ratio/max"], np.exp(log_ratio.max()), rtol=1e-5)
    sampled = arrays["loss_mask"] & ~out
    np.testing.assert_allclose(metrics["entropy/mean"], arrays["entropy"][sampled].mean(), rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), assignment=st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_however_rows_are_split_into_micro_batches_the_loss_gradient_and_metrics_are_the_same(seed, assignment):
    arrays = random_arrays(seed)
    denominators = np.maximum(count_members(arrays), 1).astype(np.float32)
    (total, sums), grads = _all_grads(arrays, denominators)
    split_total, split_sums, split_grads = 0.0, None, [np.zeros_like(grad) for grad in grads]
    for part in range(3):
        # The other rows become padding, so that one compiled program serves every part.
        here = np.asarray(assignment) == part
        piece = {**arrays, "segment_ids": np.where(here[:, None], arrays["segment_ids"], 0)}
        (value, part_sums), part_grads = _all_grads(piece, denominators)
        split_total += float(value)
        split_sums = part_sums if split_sums is None else merge_metrics(split_sums, part_sums)
        split_grads = [mine + np.asarray(theirs) for mine, theirs in zip(split_grads, part_grads, strict=True)]
    np.testing.assert_allclose(split_total, total, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(split_grads, grads, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    whole, merged = finish_metrics(sums), finish_metrics(split_sums)
    assert whole.keys() == merged.keys()
    for name in whole:
        np.testing.assert_allclose(merged[name], whole[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_rows_sharded_over_eight_devices_give_the_same_loss_gradient_and_metrics():
    arrays = random_arrays(5)
    denominators = np.asarray(count_members(arrays), np.float32)
    mesh = build_mesh(MeshConfig(data=2, fsdp=4))
    sharded = jax.device_put(arrays, batch_sharding(mesh))
    assert np.array_equal(count_members(sharded), count_members(arrays))
    pairs = zip(jax.tree.leaves(_all_grads(sharded, denominators)), jax.tree.leaves(_all_grads(arrays, denominators)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_mismatch_of_nearly_equal_policies_is_tiny_and_not_rounding_noise():
    arrays = _tokens([-0.5, -0.7], [-0.5001, -0.6998])
    _, metrics = compute_loss(arrays, np.ones(3), CONFIG)
    np.testing.assert_allclose(metrics["mismatch/kl/mean"], (1e-4**2 + 2e-4**2) / 4, rtol=0.01)


def test_a_missing_array_is_named():
    arrays = random_arrays(6)
    del arrays["ref_logprobs"]
    with pytest.raises(ValueError, match=r"missing: \['ref_logprobs'\]"):
        compute_loss(arrays, np.ones(3), CONFIG)
    with pytest.raises(ValueError, match="segment_ids"):
        count_members({name: arrays[name] for name in ("loss_mask", "rl_weights", "ce_weights", "ref_kl_weights")})


def test_arrays_of_different_shapes_are_refused():
    arrays = random_arrays(7)
    arrays["trainer_logprobs_raw"] = arrays["trainer_logprobs_raw"][:1]
    with pytest.raises(AssertionError, match="shape"):
        compute_loss(arrays, np.ones(3), CONFIG)
