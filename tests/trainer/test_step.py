"""The compiled step: one objective for every split, mesh and filler; no update from a bad gradient or from nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrl.config.trainer import COUNT_AXES, MeshConfig
from jaxrl.losses import finish_metrics
from jaxrl.trainer.compiles import num_compiles
from jaxrl.trainer.state import Accumulator
from jaxrl.trainer.step import ARRAY_DTYPES, build_psum_denominators, densify
from jaxrl.types import component_members
from tests.trainer.tiny import (
    MESHES,
    accumulate,
    make_batch,
    make_config,
    make_programs,
    make_sample,
    make_state,
    take_step,
    to_host,
)

ALL_STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")


def samples_of_all_kinds():
    """Nine samples of 3 to 11 tokens; some carry every stream, some only advantages."""
    return [make_sample(i, 3 + i, streams=ALL_STREAMS if i % 2 else ("advantages",)) for i in range(9)]


def assert_trees_close(found, expected, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), found, expected)


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def gradient(batches):
    """The gradient of one step whose samples were packed in several batches."""
    programs = make_programs(make_config())
    step = batches[0]
    step.micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    step.member_counts = sum(batch.member_counts for batch in batches)
    accumulator = accumulate(programs, make_state(programs), step)
    metrics = finish_metrics(accumulator.metrics)
    return to_host(accumulator.grads), {name: float(value) for name, value in metrics.items()}


def test_how_a_batch_is_split_into_micro_batches_does_not_change_its_gradient():
    # One sample trains a single token, the other nine: a mean of per-micro-batch means would weigh them alike.
    config = make_config()
    short, long = make_sample(0, 9, num_prompt=8), make_sample(1, 15, num_prompt=6)
    grads, metrics = gradient([make_batch([short, long], config)])
    for split in ([short, long], [long, short]):
        split_grads, split_metrics = gradient([make_batch([sample], config) for sample in split])
        assert_trees_close(split_grads, grads, rtol=1e-4, atol=1e-6)
        assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert metrics["tokens/rl"] == 10 and max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) > 1e-2


def test_packing_samples_into_one_row_does_not_change_their_gradient():
    batches = [make_batch(samples_of_all_kinds(), make_config(max_segments=segments)) for segments in (4, 1)]
    assert [len(batch.micro_batches) for batch in batches] == [2, 5]
    (packed, packed_metrics), (alone, alone_metrics) = (gradient([batch]) for batch in batches)
    assert_trees_close(alone, packed, rtol=1e-4, atol=1e-6)
    assert alone_metrics == pytest.approx(packed_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mesh", [MESHES["data 8"], MESHES["2x2x2"], "data, tensor, context"], ids=lambda mesh: str(mesh))
def test_denominators_are_summed_over_token_shards_with_one_all_reduce(mesh):
    if isinstance(mesh, MeshConfig):
        mesh = make_programs(make_config(mesh=mesh, rows=1)).mesh
    else:
        mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    shards = int(np.prod([mesh.shape[axis] for axis in COUNT_AXES if axis in mesh.shape]))
    program = build_psum_denominators(mesh)
    counts = np.zeros((shards, 3), np.int32)
    counts[:, 0] = np.arange(1, shards + 1)
    counts[0, 1] = 2**24 + 1
    found = program(counts)
    # An empty component divides by one; int32 inside: float32 could not add up to 2**24 + 2.
    np.testing.assert_array_equal(found, np.float32([shards * (shards + 1) / 2, 2**24 + 1, 1]))
    assert found.dtype == jnp.float32
    text = program.lower(jax.ShapeDtypeStruct((shards, 3), jnp.int32)).compile().as_text()
    assert re.findall(r"all-\w+(?=\()|reduce-scatter(?=\()|collective-\w+(?=\()", text) == ["all-reduce"]


def members(micro_batch):
    """Members of each component and the tokens that have context, recomputed from the packed arrays."""
    arrays = densify(micro_batch)
    segments = arrays["segment_ids"]
    has_context = np.zeros_like(segments, bool)
    has_context[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    weights = (arrays[name] for name in ("rl_weights", "ce_weights", "ref_kl_weights"))
    return arrays, component_members(arrays["loss_mask"], *weights, has_context), segments != 0


@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("advantages",)], ids=["all streams", "advantages"])
def test_what_a_masked_slot_holds_cannot_change_a_single_bit_of_the_update(filler, streams):
    config = make_config()
    programs = make_programs(config)
    batch = make_batch([make_sample(i, 4 + i, num_prompt=3, streams=streams) for i in range(4)], config)
    denominators = programs.psum_denominators(batch.member_counts)

    def updated(arrays_of):
        state = make_state(programs)
        accumulator = programs.zero_accumulator()
        for micro_batch in batch.micro_batches:
            accumulator, _ = programs.grad_step(state, accumulator, arrays_of(micro_batch), denominators)
        state, metrics = programs.apply(state, accumulator)
        return to_host(state), {name: float(value) for name, value in metrics.items()}

    def filled(micro_batch):
        arrays, member, is_real = members(micro_batch)
        compared = member.rl | member.ref_kl
        masked = {
            "inference_logprobs": ~compared,
            "temperatures": ~(is_real & arrays["loss_mask"] | member.ref_kl),
            "advantages": ~member.rl,
            "rl_weights": ~(is_real & arrays["loss_mask"]),
            "ce_weights": ~is_real,
            "ref_kl_weights": ~is_real,
            "ref_logprobs": ~member.ref_kl,
        }
        for name, where in masked.items():
            assert where.any(), name
            arrays[name] = np.where(where, np.float32(filler), arrays[name])
        arrays["token_ids"] = np.where(is_real, arrays["token_ids"], 63).astype(np.int32)
        arrays["position_ids"] = np.where(is_real, arrays["position_ids"], 10**6).astype(np.int32)
        arrays["loss_mask"] = arrays["loss_mask"] | ~is_real
        return arrays

    clean, clean_metrics = updated(densify)
    dirty, dirty_metrics = updated(filled)
    assert clean_metrics["optim/grad_norm"] > 0
    assert_trees_equal(dirty, clean)
    assert dirty_metrics == clean_metrics


def with_nan(batch):
    """Poison one trained token's advantage."""
    micro_batch = batch.micro_batches[0]
    row, position = np.argwhere(members(micro_batch)[1].rl)[0]
    micro_batch.advantages[row, position] = np.nan
    return batch


def test_a_nan_gradient_is_skipped_and_counted_and_leaves_weights_moments_and_schedule_alone():
    config = make_config()
    programs = make_programs(config)
    samples = [make_sample(0, 10)]
    state, first = take_step(programs, make_state(programs), make_batch(samples, config, 1))
    before = to_host(state)
    state, second = take_step(programs, state, with_nan(make_batch(samples, config, 2)))
    after = to_host(state)
    assert_trees_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert (int(after.step), int(after.num_skipped), int(after.num_updates)) == (2, 1, 1)
    assert not np.isfinite(second["optim/grad_norm"]) and second["optim/skipped_steps"] == 1
    state, third = take_step(programs, state, make_batch(samples, config, 3))
    # The skipped step did not use up a rate of the warm-up, and the weights move again.
    assert first["optim/lr"] < second["optim/lr"] == third["optim/lr"] == pytest.approx(0.5e-2, rel=1e-5)
    assert third["optim/skipped_steps"] == 1
    assert np.abs(to_host(state).params["embed"]["weight"] - after.params["embed"]["weight"]).max() > 1e-4


def test_a_step_without_any_member_has_a_zero_gradient_and_changes_nothing_but_the_counters():
    config = make_config()
    programs = make_programs(config)
    state, _ = take_step(programs, make_state(programs), make_batch([make_sample(0, 10)], config, 1))
    before = to_host(state)
    sample = make_sample(1, 10, streams=("advantages", "rl_weights"))
    sample.rl_weights[:] = 0.0
    batch = make_batch([sample], config, 2)
    assert batch.num_loss_tokens == 0
    state, metrics = take_step(programs, state, batch)
    after = to_host(state)
    assert metrics["optim/grad_norm"] == 0.0 and metrics["loss/total"] == 0.0
    # Neither weight decay nor the momentum of step 1 may move the policy.
    assert_trees_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert (int(after.step), int(after.num_empty), int(after.num_skipped)) == (2, 1, 0)
    assert metrics["optim/empty_steps"] == 1 and metrics["optim/skipped_steps"] == 0


def test_three_steps_of_cross_entropy_lower_the_loss():
    config = make_config()
    programs = make_programs(config)
    sample = make_sample(0, 14, streams=("advantages", "rl_weights", "ce_weights"))
    sample.rl_weights[:], sample.ce_weights[:] = 0.0, 1.0
    sample.ce_weights[0] = 0.0
    state, losses = make_state(programs), []
    for step in (1, 2, 3):
        state, metrics = take_step(programs, state, make_batch([sample], config, step))
        losses.append(metrics["loss/total"])
        assert metrics["loss/total"] == metrics["loss/ce"] == pytest.approx(metrics["ce/nll/mean"])
    assert losses[0] > losses[1] > losses[2] and losses[0] - losses[2] > 0.3


def test_the_gradient_norm_is_reported_before_clipping():
    config = make_config()
    programs = make_programs(config)
    samples = [make_sample(0, 9), make_sample(1, 15)]
    grads, _ = gradient([make_batch(samples, config)])
    norm = np.sqrt(sum(np.square(leaf.astype(np.float64)).sum() for leaf in jax.tree.leaves(grads)))
    state, metrics = take_step(programs, make_state(programs), make_batch(samples, config))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 2 * config.optimizer.max_grad_norm
    # The first moment is a tenth of the clipped gradient.
    moment = np.sqrt(
        sum(np.square(leaf.astype(np.float64)).sum() for leaf in jax.tree.leaves(to_host(state.opt_state[1].mu)))
    )
    assert moment == pytest.approx(0.1 * config.optimizer.max_grad_norm, rel=1e-4)


def test_an_absent_stream_becomes_its_identity_on_real_tokens_and_zero_on_padding():
    micro_batch = make_batch([make_sample(0, 5)], make_config()).micro_batches[0]
    assert micro_batch.rl_weights is None and micro_batch.ref_logprobs is None
    arrays = densify(micro_batch)
    assert {name: array.dtype for name, array in arrays.items()} == ARRAY_DTYPES
    np.testing.assert_array_equal(arrays["rl_weights"], (micro_batch.segment_ids != 0).astype(np.float32))
    assert all(not arrays[name].any() for name in ("ce_weights", "ref_kl_weights", "ref_logprobs"))
    assert arrays["advantages"] is micro_batch.advantages


def test_a_consumed_state_cannot_be_used_again():
    config = make_config()
    programs = make_programs(config)
    state = make_state(programs)
    accumulator = accumulate(programs, state, make_batch([make_sample(0, 6)], config))
    programs.apply(state, accumulator)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, accumulator)))


def test_masters_in_bfloat16_keep_their_precision_and_have_moments_in_float32():
    programs = make_programs(make_config(param_dtype="bfloat16", compute_dtype="bfloat16"))
    state = make_state(programs)
    before = to_host(state.params["embed"]["weight"]).astype(np.float32)
    zeros = programs.zero_accumulator()
    totals = zeros.metrics.totals | {"tokens/rl": jnp.float32(1)}
    accumulator = Accumulator(jax.tree.map(jnp.ones_like, zeros.grads), zeros.metrics._replace(totals=totals))
    state, metrics = programs.apply(state, accumulator)
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(
        lambda leaf: leaf.dtype, programs.abstract_state
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.opt_state[1].mu, state.opt_state[1].nu))} == {"float32"}
    assert (to_host(state.params["embed"]["weight"]).astype(np.float32) != before).any()
    assert metrics["optim/empty_steps"] == 0


def test_a_micro_batch_of_another_shape_is_refused_instead_of_compiled():
    programs = make_programs(make_config())
    state = make_state(programs)
    micro_batch = make_batch([make_sample(0, 5)], make_config(rows=3)).micro_batches[0]
    denominators = programs.psum_denominators(np.ones((1, 3), np.int32))
    programs.compile()
    before = num_compiles()
    with pytest.raises(AssertionError, match=r"\(3, 16\)"):
        programs.grad_step(state, programs.zero_accumulator(), densify(micro_batch), denominators)
    assert num_compiles() == before
