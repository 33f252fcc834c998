"""The counters that every task sampler keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.tasks.counting import GroupCounters

groups = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=8), min_size=1, max_size=8)


def test_a_run_of_groups_by_hand() -> None:
    counters = GroupCounters()
    for rewards in ([1, 1, None, float("nan")], [None] * 4, [1, 0, None, 0.5], [None, 0, None, None]):
        counters.add(rewards, None)
    assert counters.metrics() == {
        "groups": 4.0,
        "signal_groups": 1.0,
        "unscored_groups": 1.0,
        "episodes": 16.0,
        "scored_episodes": 6.0,
        "missing_rewards": 10.0,
        "zero_signal_fraction": 0.75,
        "signal_groups_per_episode": 1 / 16,
    }


def test_costs_are_summed_and_missing_rewards_still_cost() -> None:
    counters = GroupCounters()
    counters.add([1.0, 0.0], [20, 100])
    counters.add([None, None], [400, 1.5])
    metrics = counters.metrics()
    assert metrics["cost"] == 521.5 and metrics["signal_groups_per_cost"] == 1 / 521.5


def test_what_is_undefined_is_absent() -> None:
    assert set(GroupCounters().metrics()) == {
        "groups", "signal_groups", "unscored_groups", "episodes", "scored_episodes", "missing_rewards",
    }  # fmt: skip
    free = GroupCounters()
    free.add([1.0, 0.0], [0.0, 0.0])
    assert free.metrics()["cost"] == 0.0 and "signal_groups_per_cost" not in free.metrics()


def test_missing_rewards_are_returned_as_left_out_never_as_zero() -> None:
    assert GroupCounters().add([1.0, None, float("nan"), 0.0], None) == [1.0, 0.0]


@given(groups, st.randoms())
def test_the_order_inside_a_group_does_not_matter(rewards: list[list[float | None]], random) -> None:  # type: ignore[no-untyped-def]
    one, other = GroupCounters(), GroupCounters()
    for group in rewards:
        one.add(group, None)
        other.add(random.sample(group, len(group)), None)
    assert one == other


@given(st.integers(1, 8), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_for_full_groups_signal_per_episode_times_size_is_the_share_of_groups_with_signal(size: int, firsts: list[float]) -> None:
    counters = GroupCounters()
    for first in firsts:
        counters.add([first] + [0.5] * (size - 1), None)
    metrics = counters.metrics()
    assert metrics["signal_groups_per_episode"] * size == pytest.approx(1 - metrics["zero_signal_fraction"])


@pytest.mark.parametrize(
    ("rewards", "costs", "message"),
    [
        ([], None, "is empty"),
        ([1.0, float("inf")], None, "finite, None or NaN"),
        ([1.0, 0.0], [1.0], "one cost per rollout"),
        ([1.0], [-1.0], "not negative"),
        ([1.0], [float("nan")], "finite and not negative"),
        ([1.0, 0.0], [1e308, 1e308], "has become infinite"),
    ],
)
def test_what_is_refused_changes_nothing(rewards: list, costs: list | None, message: str) -> None:
    counters = GroupCounters()
    with pytest.raises(ValueError, match=message):
        counters.add(rewards, costs)
    assert counters == GroupCounters()


@pytest.mark.parametrize("first", [None, [1.0]])
def test_costs_come_for_every_group_or_for_none_also_after_a_restart(first: list[float] | None) -> None:
    counters = GroupCounters()
    counters.add([1.0], first)
    counters = GroupCounters.from_state(counters.state_dict())
    with pytest.raises(ValueError, match="for every group or for none"):
        counters.add([1.0], [1.0] if first is None else None)
