"""Spreading work over shards: equal counts, loads as even as a brute force finds on the golden cases."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxrl.batching.balance import partition, split_to_multiple

CASES = json.loads((Path(__file__).parents[1] / "golden/batching/partition_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["weights"]))
def test_partition_reaches_the_brute_force_optimum_of_the_golden_cases(case):
    loads = [sum(case["weights"][i] for i in part) for part in partition(case["weights"], case["k"])]
    assert max(loads) == case["min_max_load"]
    assert max(loads) - min(loads) == case["min_spread"]


def test_partition_refuses_a_number_of_items_that_has_no_equal_split():
    with pytest.raises(ValueError, match="3 items cannot be split into 2 groups"):
        partition([1, 1, 1], 2)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, 99), max_size=6 * k))))
def test_partition_uses_each_item_once_in_groups_of_one_size_no_further_apart_than_the_widest_chunk(drawn):
    num_parts, costs = drawn
    costs += [0] * (-len(costs) % num_parts)
    parts = partition(costs, num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // num_parts}
    loads = [sum(costs[i] for i in part) for part in parts]
    ranked = sorted(costs, reverse=True)
    chunks = [ranked[i : i + num_parts] for i in range(0, len(ranked), num_parts)]
    assert max(loads) - min(loads) <= max((chunk[0] - chunk[-1] for chunk in chunks), default=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 6))
def test_splitting_keeps_every_item_once_and_stops_at_the_next_multiple_or_when_each_bin_has_one_item(sizes, multiple):
    items = iter(range(sum(sizes)))
    bins = [[next(items) for _ in range(size)] for size in sizes]
    costs = [float(1 + 7 * i % 5) for i in range(sum(sizes))]
    result = split_to_multiple(bins, costs, multiple)
    assert sorted(i for b in result for i in b) == list(range(sum(sizes)))
    assert all(result)
    assert len(result) % multiple == 0 or all(len(b) == 1 for b in result)
    assert len(result) <= -(-len(bins) // multiple) * multiple
    if multiple == 1:
        assert result == bins
