"""Buckets, prefill plans and first-in-first-out slots."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.engine.scheduler import Scheduler, bucket_lengths, plan_prefills, smallest_bucket


def test_buckets_have_two_significant_bits_and_end_at_the_window() -> None:
    assert bucket_lengths(16, 512) == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert bucket_lengths(1, 13) == (1, 2, 3, 4, 6, 8, 12, 13)
    assert bucket_lengths(20, 100) == (24, 32, 48, 64, 96, 100)


@given(shortest=st.integers(1, 100), longest=st.integers(1, 5000), length=st.integers(1, 5000))
def test_the_chosen_bucket_holds_the_length_with_at_most_half_again(shortest: int, longest: int, length: int) -> None:
    length = min(length, longest)
    buckets = bucket_lengths(shortest, longest)
    bucket = smallest_bucket(buckets, length)
    assert length <= bucket <= longest
    assert bucket <= max(1.5 * length, buckets[0])


@settings(max_examples=50)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12),
    num_rows=st.integers(1, 4),
)
def test_every_slot_gets_its_own_prompt_but_the_last_token(prompts: list[list[int]], num_rows: int) -> None:
    num_slots = 12
    by_slot = {slot: np.array(prompt, np.int32) for slot, prompt in enumerate(prompts)}
    calls = plan_prefills(list(by_slot.items()), buckets=(2, 4, 8), num_rows=num_rows, num_slots=num_slots)
    filled = {}
    for call in calls:
        assert call.token_ids.shape[0] == num_rows and call.token_ids.shape[1] in (2, 4, 8)
        assert call.rows.shape == call.slots.shape == (num_slots,)
        for row, slot in zip(call.rows.tolist(), call.slots.tolist(), strict=True):
            if slot < num_slots:
                assert slot not in filled
                filled[slot] = call.token_ids[row]
    assert sorted(filled) == [slot for slot, prompt in by_slot.items() if len(prompt) > 1]
    for slot, row in filled.items():
        expected = by_slot[slot][:-1]
        assert row[: len(expected)].tolist() == expected.tolist() and not row[len(expected) :].any()
        assert len(row) == smallest_bucket((2, 4, 8), len(expected)), "a bucket depends on the prompt alone"
    distinct = {tuple(prompt[:-1]) for prompt in prompts if len(prompt) > 1}
    assert sum(call.num_tokens for call in calls) == sum(map(len, distinct))


def test_the_ticket_that_waited_longest_takes_the_lowest_free_slot() -> None:
    scheduler: Scheduler[str] = Scheduler(2)
    for key in "abcd":
        scheduler.add(key, key.upper())
    assert scheduler.admit() == [(0, "A"), (1, "B")]
    assert scheduler.admit() == [] and scheduler.num_waiting == 2
    assert scheduler.withdraw("c") == "C" and scheduler.withdraw("a") is None
    assert scheduler.release(1) == "B" and scheduler.release(0) == "A"
    assert scheduler.admit() == [(0, "D")]
    assert scheduler.running == {0: "D"}
