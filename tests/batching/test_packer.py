"""Packing: every token once and in order, static shapes, balanced shards, exact counts, errors that name the env."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl.batching import first_fit_decreasing, pack
from jaxrl.batching.balance import split_to_multiple
from jaxrl.errors import PackingError
from jaxrl.types import OPTIONAL_STREAMS, MicroBatch, TrainBatch, TrainingSample
from tests.builders import make_micro_batch, make_sample

CASES = json.loads((Path(__file__).parents[1] / "golden/batching/packing_cases.json").read_text())


def sample_of(length: int, **streams: object) -> TrainingSample:
    return make_sample(1, length - 1, **streams)


def rows_of(batch: TrainBatch) -> list[list[list[int]]]:
    """Packed sample indices per micro-batch, row and segment."""
    return [[[int(i) for i in row if i >= 0] for row in m.sample_index] for m in batch.micro_batches]


def row_lengths_by_shard(batch: TrainBatch, lengths: list[int], rows: int, shards: int) -> list[list[list[int]]]:
    """Per shard, its real rows as lists of sample lengths."""
    return [
        [[lengths[i] for i in row] for m in rows_of(batch) for row in m[s * rows : (s + 1) * rows] if row]
        for s in range(shards)
    ]


# Golden cases


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_golden_packing_cases(case):
    lengths, workers = case["lengths"], case["workers"]
    bins = first_fit_decreasing(lengths, case["seq_len"], max_items=99)
    assert [[lengths[i] for i in b] for b in bins] == case["ffd_bins"]
    assert [[lengths[i] for i in b] for b in split_to_multiple(bins, lengths, workers)] == case["after_split"]

    batch = pack([sample_of(n) for n in lengths], row_length=case["seq_len"], rows=1, shards=workers)
    assert len(batch.micro_batches) == case["micro_batches_per_worker"]
    real = [row for shard in row_lengths_by_shard(batch, lengths, 1, workers) for row in shard]
    assert Counter(map(tuple, real)) == Counter(map(tuple, case["after_split"]))
    assert len(batch.micro_batches) * workers - len(real) == case["dummy_micro_batches"]


def test_a_small_batch_worked_out_by_hand():
    grpo = make_sample(2, 2, token_ids=[11, 12, 13, 14], logprob=-0.5, temperature=0.5, advantages=2.0)
    echo = make_sample(
        1, 2, token_ids=[21, 22, 23], logprob=-0.25, advantages=-1.0, rl_weights=[0, 1, 0], ce_weights=[0, 0, 0.5]
    )
    batch = pack([echo, grpo], step=7, row_length=8, rows=1, shards=2, max_segments=3)
    (m,) = batch.micro_batches
    # One row of 7 tokens is heavier than two of 4 and 3, and there are two shards: each sample gets a row.
    assert m.sample_index.tolist() == [[1, -1, -1], [0, -1, -1]]
    assert m.token_ids.tolist() == [[11, 12, 13, 14, 0, 0, 0, 0], [21, 22, 23, 0, 0, 0, 0, 0]]
    assert m.segment_ids.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert m.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4]]
    assert m.loss_mask.astype(int).tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    assert m.inference_logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, 0, 0, 0], [0, -0.25, -0.25, 0, 0, 0, 0, 0]]
    assert m.temperatures.tolist() == [[1, 1, 0.5, 0.5, 1, 1, 1, 1], [1] * 8]
    assert m.advantages.tolist() == [[0, 0, 2, 2, 0, 0, 0, 0], [0, -1, -1, 0, 0, 0, 0, 0]]
    assert m.rl_weights.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert m.ce_weights.tolist() == [[0] * 8, [0, 0, 0.5, 0, 0, 0, 0, 0]]
    assert m.ref_kl_weights is None and m.ref_logprobs is None
    assert batch.member_counts.tolist() == [[2, 0, 0], [1, 1, 0]]
    assert (batch.step, batch.num_samples, batch.num_tokens, batch.num_loss_tokens, batch.overlong) == (7, 2, 7, 4, [])


@pytest.mark.parametrize(("num_samples", "shards", "per_shard"), [(4, 2, 2), (5, 2, 3), (7, 1, 7), (11, 4, 3)])
def test_samples_that_fill_a_row_give_equal_counts_and_dummies_that_train_nothing(num_samples, shards, per_shard):
    batch = pack([sample_of(6) for _ in range(num_samples)], row_length=6, rows=1, shards=shards)
    assert len(batch.micro_batches) == per_shard
    real = [row for m in rows_of(batch) for row in m if row]
    assert len(real) == num_samples
    for m in batch.micro_batches:
        dummy = m.sample_index[:, 0] < 0
        assert not m.loss_mask[dummy].any() and not m.segment_ids[dummy].any() and not m.advantages[dummy].any()
    assert batch.member_counts.sum(0).tolist() == [5 * num_samples, 0, 0]


def test_shards_get_equal_sums_where_that_is_possible():
    lengths = [100, 90, 80, 70]
    batch = pack([sample_of(n) for n in lengths], row_length=100, rows=1, shards=2)
    by_shard = row_lengths_by_shard(batch, lengths, 1, 2)
    assert [sum(map(sum, shard)) for shard in by_shard] == [170, 170]


def test_attention_work_counts_in_the_balance():
    lengths = [32, 32, 16, 16, 16, 16]
    samples = [sample_of(n) for n in lengths]
    batch = pack(samples, row_length=32, rows=1, shards=2, attention_cost=64 / 17408)
    assert row_lengths_by_shard(batch, lengths, 1, 2) == [[[32], [16, 16]]] * 2
    # Rows of one micro-batch match: both shards do their heavy row first.
    assert [[len(row) for row in m] for m in rows_of(batch)] == [[1, 1], [2, 2]]


def test_the_heaviest_row_is_split_by_tokens_alone_or_by_attention_work_too():
    lengths = [8, 5, 5, 1]  # first fit gives [8, 1] and [5, 5]; three shards need a third row
    for attention_cost, expected in ((0.0, [[8, 1], [5], [5]]), (1.0, [[8], [1], [5, 5]])):
        batch = pack([sample_of(n) for n in lengths], row_length=10, rows=1, shards=3, attention_cost=attention_cost)
        rows = [row for shard in row_lengths_by_shard(batch, lengths, 1, 3) for row in shard]
        assert sorted(rows) == sorted(expected)


def test_rows_are_split_where_shards_would_idle_and_no_sample_is_lost():
    lengths = [20, 18, 9, 9, 8, 8, 8]
    batch = pack([sample_of(n) for n in lengths], row_length=64, rows=1, shards=4, attention_cost=64 / 17408)
    rows = [row for shard in row_lengths_by_shard(batch, lengths, 1, 4) for row in shard]
    assert len(rows) == 4 and sum(len(row) > 1 for row in rows) == 3
    assert sorted(n for row in rows for n in row) == sorted(lengths)


# Streams


def test_plain_grpo_keeps_every_optional_stream_but_advantages_absent():
    (m,) = pack([sample_of(4), sample_of(5)], row_length=9, rows=1, shards=1).micro_batches
    assert [name for name in OPTIONAL_STREAMS if getattr(m, name) is not None] == ["advantages"]


def test_a_stream_of_one_micro_batch_stays_absent_in_the_others():
    ce_only = sample_of(6, advantages=None, rl_weights=0.0, ce_weights=1.0)
    batch = pack([ce_only, sample_of(5)], row_length=6, rows=1, shards=1)
    first, second = batch.micro_batches
    assert first.ce_weights is not None and first.advantages is None
    assert second.ce_weights is None and second.rl_weights is None and second.advantages is not None


@pytest.mark.parametrize("long_is_ce", [True, False])
def test_components_mixed_in_one_row_are_filled_on_either_side_of_the_boundary(long_is_ce):
    ce = sample_of(6 if long_is_ce else 4, advantages=None, rl_weights=[0.0] * (6 if long_is_ce else 4), ce_weights=1.0)
    grpo = sample_of(4 if long_is_ce else 6)
    (m,) = pack([ce, grpo], row_length=12, rows=1, shards=1).micro_batches
    if long_is_ce:
        assert m.rl_weights.tolist() == [[0] * 6 + [1] * 4 + [0] * 2]
        assert m.ce_weights.tolist() == [[0] + [1] * 5 + [0] * 4 + [0] * 2]
        assert m.advantages.tolist() == [[0] * 6 + [0, 1, 1, 1] + [0] * 2]
    else:
        assert m.rl_weights.tolist() == [[1] * 6 + [0] * 4 + [0] * 2]
        assert m.ce_weights.tolist() == [[0] * 6 + [0] + [1] * 3 + [0] * 2]
        assert m.advantages.tolist() == [[0] + [1] * 5 + [0] * 4 + [0] * 2]


@pytest.mark.parametrize("long_is_opd", [True, False])
def test_reference_logprobs_stay_aligned_on_either_side_of_the_boundary(long_is_opd):
    length = 6 if long_is_opd else 4
    opd = sample_of(length, advantages=None, rl_weights=0.0, ref_kl_weights=1.0, ref_logprobs=[-1.5] * length)
    (m,) = pack([opd, sample_of(10 - length)], row_length=10, rows=1, shards=1).micro_batches
    assert m.ref_logprobs.tolist() == [[-1.5] * 6 + [0] * 4 if long_is_opd else [0] * 6 + [-1.5] * 4]


def test_envs_and_temperatures_share_a_row_and_stay_per_token():
    samples = [make_sample(1, 3, temperature=0.7, env_name="a"), make_sample(1, 2, temperature=1.1, env_name="b")]
    (m,) = pack(samples, row_length=8, rows=1, shards=1).micro_batches
    np.testing.assert_array_equal(m.temperatures, np.float32([[1, 0.7, 0.7, 0.7, 1, 1.1, 1.1, 1]]))
    assert [samples[i].env_name for i in m.sample_index[0] if i >= 0] == ["a", "b"]


def test_a_stream_in_double_precision_is_packed_as_float32():
    sample = sample_of(4)
    sample.advantages = sample.advantages.astype(np.float64)
    (m,) = pack([sample], row_length=4, rows=1, shards=1).micro_batches
    assert m.advantages.dtype == np.float32


def test_an_array_of_another_kind_is_refused_by_env():
    for stream in (np.ones(5, np.float64), np.ones((5, 1), np.int32)):
        bad = make_sample(env_name="bad")
        bad.token_ids = stream
        with pytest.raises(PackingError, match="env 'bad', packed sample 1: `token_ids` must be a one-dimensional int32 array"):
            pack([make_sample(), bad], row_length=8, rows=1, shards=1)


# Overlong samples


def test_an_overlong_sample_is_dropped_and_reported_by_its_index():
    samples = [sample_of(3), sample_of(9), sample_of(4)]
    batch = pack(samples, row_length=8, rows=1, shards=1, overlong="drop")
    assert (batch.overlong, batch.num_samples, batch.num_tokens) == ([1], 2, 7)
    # `sample_index` speaks of the packed list: samples[2] is packed sample 1.
    assert rows_of(batch) == [[[1, 0]]]


def test_an_overlong_sample_is_truncated_on_the_right_in_every_stream_and_reported():
    long = sample_of(9, rl_weights=1.0, ce_weights=0.5, ref_kl_weights=1.0, ref_logprobs=-1.0)
    batch = pack([sample_of(3), long], row_length=8, rows=1, shards=1, overlong="truncate")
    assert (batch.overlong, batch.num_samples, batch.num_tokens) == ([1], 2, 11)
    first = batch.micro_batches[0]
    assert first.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.member_counts.tolist() == [[2 + 7, 7, 7]]
    assert len(long) == 9, "the caller's sample is left as it was"


def test_a_distillation_sample_cut_inside_its_prompt_trains_nothing():
    opd = make_sample(6, 3, advantages=None, rl_weights=0.0, ref_kl_weights=1.0, ref_logprobs=-1.0)
    batch = pack([opd, sample_of(3)], row_length=4, rows=1, shards=1, overlong="truncate")
    assert batch.member_counts.tolist() == [[2, 0, 0]]


# Errors


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (make_sample(advantages=None, env_name="bad"), "live rl tokens but no `advantages`"),
        (make_sample(advantages=None, rl_weights=[0, 0, 0, 0, -1], env_name="bad"), "no `advantages`"),
        (make_sample(ref_kl_weights=1.0, env_name="bad"), "ref_kl members but no `ref_logprobs`"),
        (make_sample(ce_weights=[0.1, 0, 0, 0, 0], env_name="bad"), "first token is a ce member"),
        (
            make_sample(ref_kl_weights=[1, 0, 0, 0, 0], ref_logprobs=0.0, env_name="bad"),
            "first token is a ref_kl member",
        ),
        (make_sample(0, 3, env_name="bad"), "first token is a rl member"),
        (make_sample(0, 0, env_name="bad"), "no tokens"),
        (make_sample(advantages=np.nan, env_name="bad"), "`advantages` holds nan at a rl member"),
        (make_sample(logprob=-np.inf, env_name="bad"), "`inference_logprobs` holds -inf at a rl member"),
        (make_sample(rl_weights=np.inf, env_name="bad"), "`rl_weights` holds inf at a rl member"),
        (make_sample(ce_weights=[0, np.nan, 0, 0, 0], env_name="bad"), "`ce_weights` holds nan at a ce member"),
        (
            make_sample(ref_kl_weights=1.0, ref_logprobs=np.nan, env_name="bad"),
            "`ref_logprobs` holds nan at a ref_kl member",
        ),
        (make_sample(temperature=0.0, env_name="bad"), "`temperatures` holds 0.0"),
        (make_sample(temperature=np.nan, env_name="bad"), "`temperatures` holds nan"),
        (make_sample(advantages=[1.0, 1.0], env_name="bad"), "`advantages` has 2 entries for 5 tokens"),
        (make_sample(2, 20, advantages=[1.0] * 20, env_name="bad"), "`advantages` has 20 entries for 22 tokens"),
        (make_sample(advantages=None, rl_weights=[1.0], env_name="bad"), "`rl_weights` has 1 entries for 5 tokens"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_sample_is_refused_by_env_wherever_it_stands(bad, message, place):
    samples = [make_sample(env_name="good"), make_sample(2, 4, env_name="good")]
    samples.insert(place, bad)
    with pytest.raises(PackingError, match=message) as caught:
        pack(samples, row_length=16, rows=1, shards=1, overlong="truncate")
    assert re.match(rf"env 'bad', (packed )?sample {place}: ", str(caught.value))


@pytest.mark.parametrize(
    ("streams", "component"),
    [({}, "rl"), ({"rl_weights": 0.0, "ref_kl_weights": 1.0, "ref_logprobs": -1.0, "advantages": None}, "ref_kl")],
)
def test_tokens_that_the_policy_did_not_sample_are_refused_by_any_loss_but_ce(streams, component):
    bad = make_sample(env_name="bad", **streams)
    bad.has_policy_logprobs = False
    with pytest.raises(PackingError, match=rf"'bad', sample 1: it has {component} members, but the policy did not sample its tokens"):
        pack([make_sample(), bad], row_length=16, rows=1, shards=1)
    taught = make_sample(rl_weights=0.0, ce_weights=1.0)
    taught.has_policy_logprobs = False
    assert pack([make_sample(), taught], row_length=16, rows=1, shards=1).member_counts.sum(axis=0).tolist() == [3, 3, 0]


def test_live_rl_tokens_without_advantages_are_refused_even_beside_a_neighbour_that_has_them():
    with pytest.raises(PackingError, match="env 'toy', sample 1"):
        pack([make_sample(), make_sample(advantages=None)], row_length=16, rows=1, shards=1)


def test_values_that_no_component_reads_may_be_anything():
    filler = make_sample(2, 2, advantages=[np.nan, np.inf, 1, 1], rl_weights=[np.nan, np.inf, 1, 1])
    filler.inference_logprobs = np.float32([np.nan, -np.inf, -1, -1])
    batch = pack([filler, make_sample()], row_length=16, rows=1, shards=1)
    assert batch.member_counts.tolist() == [[5, 0, 0]]


def test_huge_finite_values_whose_sum_overflows_are_not_mistaken_for_infinite_ones():
    batch = pack([make_sample(1, 4, advantages=3e38)], row_length=8, rows=1, shards=1)
    assert batch.member_counts.tolist() == [[4, 0, 0]]


def test_an_empty_list_and_a_list_of_overlong_samples_are_refused():
    with pytest.raises(PackingError, match="nothing to pack: 0 samples"):
        pack([], row_length=8, rows=1, shards=1)
    with pytest.raises(PackingError, match="nothing to pack: 1 samples, 1 of them dropped as longer than a row of 8"):
        pack([sample_of(9)], row_length=8, rows=1, shards=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "`rows`=0"),
        ({"shards": 0}, "`shards`=0"),
        ({"row_length": 0}, "`row_length`=0"),
        ({"max_segments": 0}, "`max_segments`=0"),
        ({"context_shards": 3}, "`row_length`=8 is not divisible by `context_shards`=3"),
        ({"overlong": "cut"}, "`overlong`='cut'"),
    ],
)
def test_an_impossible_shape_is_refused(changes, message):
    with pytest.raises(PackingError, match=message):
        pack([sample_of(3)], **({"row_length": 8, "rows": 1, "shards": 1} | changes))


# Properties

Drawn = tuple[list[TrainingSample], dict[str, int]]


@st.composite
def samples_and_shape(draw: st.DrawFn) -> Drawn:
    """Up to 24 samples of any mix of streams, and a shape that holds them."""
    samples = []
    for _ in range(draw(st.integers(1, 24))):
        length = draw(st.integers(1, 12))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

        def weights(length=length, rng=rng) -> np.ndarray:
            return rng.choice(np.float32([0, 0, 0.5, -1]), length) * (np.arange(length) > 0)

        kinds = draw(st.sets(st.sampled_from(["rl_weights", "ce_weights", "ref_kl_weights"])))
        sample = make_sample(0, length, token_ids=rng.integers(1, 99, length), advantages=None)
        sample.loss_mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        sample.inference_logprobs = -rng.random(length, np.float32)
        sample.temperatures = np.float32(0.5) + rng.random(length, np.float32)
        for kind in sorted(kinds):
            setattr(sample, kind, weights())
        if "ref_kl_weights" in kinds:
            sample.ref_logprobs = -rng.random(length, np.float32)
        is_live = sample.loss_mask if sample.rl_weights is None else sample.loss_mask & (sample.rl_weights != 0)
        if is_live.any():
            sample.advantages = rng.standard_normal(length).astype(np.float32)
        samples.append(sample)
    context_shards = draw(st.sampled_from([1, 2]))
    shape = {
        "row_length": 12 + context_shards * draw(st.integers(0, 4)),
        "rows": draw(st.integers(1, 3)),
        "shards": draw(st.integers(1, 4)),
        "max_segments": draw(st.integers(1, 4)),
        "context_shards": context_shards,
    }
    return samples, shape


def brute_force_counts(micro_batches: list[MicroBatch], rows: int, shards: int, context_shards: int) -> list[list[int]]:
    counts = [[0, 0, 0] for _ in range(shards * context_shards)]
    for m in micro_batches:
        num_rows, length = m.token_ids.shape
        for r in range(num_rows):
            for t in range(length):
                if m.segment_ids[r, t] == 0:
                    continue
                place = (r // rows) * context_shards + t // (length // context_shards)
                rl_weight = 1.0 if m.rl_weights is None else m.rl_weights[r, t]
                counts[place][0] += int(m.loss_mask[r, t] and rl_weight != 0)
                counts[place][1] += int(m.ce_weights is not None and m.ce_weights[r, t] != 0)
                counts[place][2] += int(m.ref_kl_weights is not None and m.ref_kl_weights[r, t] != 0)
    return counts


@settings(max_examples=60, deadline=None)
@given(samples_and_shape())
def test_every_micro_batch_equals_one_laid_out_by_a_plain_loop_over_its_samples(drawn):
    samples, shape = drawn
    batch = pack(samples, **shape)
    for m, rows in zip(batch.micro_batches, rows_of(batch), strict=True):
        expected = make_micro_batch(
            [[samples[i] for i in row] for row in rows], length=shape["row_length"], max_segments=shape["max_segments"]
        )
        expected.sample_index = m.sample_index
        for name in MicroBatch.__struct_fields__:
            np.testing.assert_array_equal(getattr(m, name), getattr(expected, name), err_msg=name, strict=True)


@settings(max_examples=60, deadline=None)
@given(samples_and_shape())
def test_every_sample_is_packed_once_in_rows_that_respect_length_and_segments(drawn):
    samples, shape = drawn
    batch = pack(samples, **shape)
    rows = [row for m in rows_of(batch) for row in m]
    assert sorted(i for row in rows for i in row) == list(range(len(samples)))
    assert all(len(row) <= shape["max_segments"] for row in rows)
    assert all(sum(len(samples[i]) for i in row) <= shape["row_length"] for row in rows)
    assert all((m.sample_index >= 0).any() for m in batch.micro_batches), "no micro-batch is all dummies"
    assert batch.num_samples == len(samples)
    assert (
        batch.num_tokens == sum(map(len, samples)) == sum(int((m.segment_ids > 0).sum()) for m in batch.micro_batches)
    )


@settings(max_examples=60, deadline=None)
@given(samples_and_shape())
def test_shards_hold_equally_many_real_rows_unless_nothing_is_left_to_split(drawn):
    samples, shape = drawn
    batch = pack(samples, **shape)
    by_shard = row_lengths_by_shard(batch, list(map(len, samples)), shape["rows"], shape["shards"])
    counts = [len(shard) for shard in by_shard]
    has_splittable = any(len(row) > 1 for shard in by_shard for row in shard)
    assert max(counts) - min(counts) <= (0 if has_splittable else 1)


@settings(max_examples=40, deadline=None)
@given(samples_and_shape())
def test_member_counts_equal_a_brute_force_count_of_each_shards_own_slice(drawn):
    samples, shape = drawn
    batch = pack(samples, **shape)
    expected = brute_force_counts(batch.micro_batches, shape["rows"], shape["shards"], shape["context_shards"])
    assert batch.member_counts.tolist() == expected
    assert batch.member_counts.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(samples_and_shape(), st.integers(0, 99))
def test_totals_do_not_depend_on_the_order_of_samples_or_on_the_shape(drawn, seed):
    samples, shape = drawn
    batch = pack(samples, **shape)
    shuffled = random.Random(seed).sample(samples, len(samples))
    for other in (
        pack(shuffled, **shape),
        pack(samples, row_length=31, rows=2, shards=1),
        pack(samples, row_length=12, rows=1, shards=8, context_shards=4),
    ):
        assert other.member_counts.sum(0).tolist() == batch.member_counts.sum(0).tolist()
        assert (other.num_tokens, other.num_samples, other.num_loss_tokens) == (
            batch.num_tokens,
            batch.num_samples,
            batch.num_loss_tokens,
        )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30), st.integers(1, 5))
def test_first_fit_decreasing_equals_a_quadratic_scan(lengths, capacity, max_items):
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b in bins:
            if sum(lengths[i] for i in b) + lengths[item] <= capacity and len(b) < max_items:
                b.append(item)
                break
        else:
            bins.append([item])
    assert first_fit_decreasing(lengths, capacity, max_items) == bins


def test_packing_does_not_write_to_the_samples():
    samples = [sample_of(5), sample_of(4, advantages=None, rl_weights=0.0, ce_weights=1.0)]
    before = [msgspec.structs.asdict(s) for s in samples]
    copies = [{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in s.items()} for s in before]
    batch = pack(samples, row_length=9, rows=1, shards=1)
    for name in OPTIONAL_STREAMS:
        stream = getattr(batch.micro_batches[0], name)
        if stream is not None:
            stream[:] = 77
    for sample, copy in zip(samples, copies, strict=True):
        for name, value in copy.items():
            np.testing.assert_array_equal(getattr(sample, name), value)
