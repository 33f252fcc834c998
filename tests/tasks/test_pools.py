"""Difficulty pools: who is in which, how draws follow from it, and what a task that always fails takes."""

import logging
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.tasks import PoolConfig, PoolsTasksConfig
from jaxrl.tasks import Pool, PoolsSampler, build_task_sampler

POOLS = [Pool("hard", 0.2, 0.5), Pool("medium", 0.8, 1.0), Pool("easy", math.inf, 0.1)]


def made(n: int, rng_seed: int = 0, **settings: float) -> PoolsSampler:
    return PoolsSampler([f"t{i}" for i in range(n)], POOLS, rng_seed, **settings)


def prob(sampler: PoolsSampler) -> dict[str, float]:
    return {name.split("/")[1]: value for name, value in sampler.metrics().items() if name.endswith("/prob") and value}


def sizes(sampler: PoolsSampler) -> dict[str, float]:
    return {name.split("/")[1]: value for name, value in sampler.metrics().items() if name.endswith("/tasks") and value}


def test_a_task_is_in_the_first_pool_that_takes_the_mean_of_its_last_group() -> None:
    sampler = made(6)
    for task, rewards in (("t0", [0.0, 0.4]), ("t1", [0.0, 0.5]), ("t2", [0.8]), ("t3", [0.81]), ("t4", [7.0, None, 7.0]), ("t5", [-3.0])):
        sampler.update(task, rewards)
    assert sizes(sampler) == {"hard": 2, "medium": 2, "easy": 2}
    sampler.update("t0", [1.0, 1.0])
    assert sizes(sampler) == {"hard": 1, "medium": 2, "easy": 3}


def test_pools_without_tasks_leave_their_share_to_the_others() -> None:
    sampler = made(4)
    assert prob(sampler) == {"unseen": 1.0}
    sampler.update("t0", [0.0])
    assert prob(sampler) == pytest.approx({"hard": 0.5 / 1.5, "unseen": 1 / 1.5})
    for task in ("t1", "t2", "t3"):
        sampler.update(task, [1.0])
    assert prob(sampler) == pytest.approx({"hard": 0.5 / 0.6, "easy": 0.1 / 0.6})


def test_draws_follow_the_shares_and_inside_a_pool_they_are_even() -> None:
    sampler = made(6, rng_seed=4)
    for task, reward in (("t0", 0.0), ("t1", 0.0), ("t2", 0.5), ("t3", 1.0)):
        sampler.update(task, [reward])
    counts = Counter(sampler.sample(10_000))
    shares = {"t0": 0.25, "t1": 0.25, "t2": 1.0, "t3": 0.1, "t4": 0.5, "t5": 0.5}
    expected = {task: share / 2.6 * 10_000 for task, share in shares.items()}
    # 5 degrees of freedom: 20.5 is exceeded once in a thousand seeds.
    assert sum((counts[task] - number) ** 2 / number for task, number in expected.items()) < 20.5


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 9), rng_seed=st.integers(0, 2**31), rounds=st.integers(1, 4))
def test_a_pool_that_nobody_joins_or_leaves_hands_out_each_task_once_a_round(n: int, rng_seed: int, rounds: int) -> None:
    sampler = made(n, rng_seed)
    drawn = sampler.sample(n * rounds)
    assert all(len(set(drawn[start : start + n])) == n for start in range(0, len(drawn), n))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 9), rng_seed=st.integers(0, 9), events=st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), max_size=60))
def test_while_others_come_and_go_those_that_stay_in_a_pool_are_drawn_equally_often(n: int, rng_seed: int, events: list) -> None:
    sampler = made(2 * n, rng_seed)
    for task in range(2 * n):
        sampler.update(f"t{task}", [0.0])
    counts: Counter[str] = Counter({f"t{task}": 0 for task in range(0, 2 * n, 2)})
    for number, reward in enumerate(events):
        drawn = sampler.sample(1)[0]
        if drawn in counts:
            counts[drawn] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
        sampler.update(f"t{2 * (number % n) + 1}", [reward])


def test_a_task_that_leaves_a_pool_in_the_middle_of_a_round_is_not_drawn_from_it() -> None:
    pools = [Pool("hard", 0.5, 1.0), Pool("easy", math.inf, 0.0)]
    sampler = PoolsSampler([f"t{i}" for i in range(8)], pools, rng_seed=3)
    first = sampler.sample(1)[0]
    solved = [f"t{i}" for i in range(8) if f"t{i}" != first][:4]
    for task in solved:
        sampler.update(task, [1.0])
    drawn = sampler.sample(3)
    assert len({first, *drawn}) == 4 and not set(drawn) & set(solved)


def test_orders_differ_between_rounds_and_seeds_and_repeat_with_the_seed() -> None:
    one, same, other = made(20, 1).sample(40), made(20, 1).sample(40), made(20, 2).sample(40)
    assert one == same and one[:20] != one[20:] and one[:20] != other[:20]


def test_a_group_without_a_reward_changes_no_pool() -> None:
    sampler = made(3)
    sampler.update("t0", [0.0])
    for task in ("t0", "t1"):
        sampler.update(task, [None, None])
        sampler.update(task, [None, math.nan])
    assert sizes(sampler) == {"hard": 1, "unseen": 2}
    assert sampler.metrics()["unscored_groups"] == 4


def test_a_task_that_never_gets_a_reward_does_not_take_the_draws_of_the_others() -> None:
    sampler = made(5, rng_seed=2)
    counts: Counter[str] = Counter()
    for _ in range(400):
        task = sampler.sample(1)[0]
        counts[task] += 1
        sampler.update(task, [None] * 4 if task == "t0" else [1.0, 0.0])
    # Left among the unseen it would have half of the draws; failing, it has 0.05 of 1.05.
    assert prob(sampler) == pytest.approx({"medium": 1 / 1.05, "failing": 0.05 / 1.05})
    assert counts["t0"] < 50


def test_a_failing_task_comes_back_with_its_next_reward_and_one_that_was_scored_may_fail_too() -> None:
    sampler = made(2)
    sampler.update("t0", [0.5])
    for _ in range(3):
        sampler.update("t0", [None])
    assert sizes(sampler) == {"failing": 1, "unseen": 1}
    sampler.update("t0", [1.0, None])
    assert sizes(sampler) == {"easy": 1, "unseen": 1}
    for _ in range(2):
        sampler.update("t0", [None])
    assert sizes(sampler) == {"easy": 1, "unseen": 1}, "its failures are counted from the last reward on"


def test_when_only_pools_of_no_weight_are_left_tasks_are_drawn_evenly_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pools = [Pool("hard", 0.5, 1.0), Pool("easy", math.inf, 0.0)]
    sampler = PoolsSampler(["a", "b", "c"], pools, failing_weight=0.0)
    for task in ("a", "b"):
        sampler.update(task, [1.0])
    assert set(sampler.sample(20)) == {"c"}
    for _ in range(3):
        sampler.update("c", [None])
    with caplog.at_level(logging.WARNING):
        assert prob(sampler) == pytest.approx({"easy": 2 / 3, "failing": 1 / 3})
        assert set(sampler.sample(50)) == {"a", "b", "c"}
    assert len(caplog.messages) == 1 and "2 in 'easy', 1 in 'failing'" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", []), ("scores", {"z": 1.0}), ("scores", {"t0": math.nan}), ("scores", {"t0": True}), ("unscored", {"t0": -1}),
        ("queues", {}), ("queues", {"hard": [0], "medium": [], "easy": [], "unseen": [9], "failing": []}), ("num_draws", -1),
        ("num_rounds", {"hard": 1}),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(key: str, value: object) -> None:
    sampler = made(3)
    sampler.update(sampler.sample(2)[0], [0.5])
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=f"damaged.*{key}"):
        sampler.load_state_dict({**before, key: value})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    "other",
    [
        lambda: PoolsSampler(["t0", "t1", "t2"], [*POOLS[:-1], Pool("easy", math.inf, 0.2)]),
        lambda: made(3, failing_weight=0.1),
        lambda: made(3, unseen_weight=0.5),
        lambda: made(3, rng_seed=1),
    ],
)
def test_the_state_of_other_pools_is_refused(other) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="of another task sampler"):
        made(3).load_state_dict(other().state_dict())


@pytest.mark.parametrize(
    ("pools", "weights", "message"),
    [
        ([], {}, "at least one pool"),
        ([Pool("a", 0.5, 1.0), Pool("a", math.inf, 1.0)], {}, "a name of its own"),
        ([Pool("unseen", math.inf, 1.0)], {}, "none 'unseen'"),
        ([Pool("failing", math.inf, 1.0)], {}, "'failing'"),
        ([Pool("a", 0.5, 1.0)], {}, "the last be infinite"),
        ([Pool("a", 0.5, 1.0), Pool("b", 0.5, 1.0), Pool("c", math.inf, 1.0)], {}, "ascend"),
        ([Pool("a", math.inf, -1.0)], {}, "weights must be finite"),
        ([Pool("a", math.inf, 0.0)], {}, "one of `pools` above 0"),
        ([Pool("a", math.inf, 1.0)], {"unseen_weight": 0.0}, "unseen_weight"),
        ([Pool("a", math.inf, 1.0)], {"failing_weight": math.nan}, "weights must be finite"),
    ],
)
def test_pools_that_cannot_be_are_refused(pools: list, weights: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolsSampler(["x"], pools, **weights)


def test_a_config_builds_its_pools() -> None:
    config = PoolsTasksConfig(
        pools=[PoolConfig(name="low", max_score=0.5, weight=3.0), PoolConfig(name="rest", weight=1.0)],
        unseen_weight=2.0,
        failing_weight=0.5,
    )
    sampler = build_task_sampler(config, list("abcd"), 3, group_size=8)
    assert isinstance(sampler, PoolsSampler)
    sampler.update("a", [0.5])
    sampler.update("b", [0.6])
    for _ in range(3):
        sampler.update("c", [None])
    assert prob(sampler) == pytest.approx({"low": 3 / 6.5, "rest": 1 / 6.5, "unseen": 2 / 6.5, "failing": 0.5 / 6.5})
    assert sampler.state_dict()["rng_seed"] == 3
