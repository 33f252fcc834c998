"""What every task sampler promises, and the order of each; the properties hold for all of them."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.tasks import SequentialTasksConfig, UniformTasksConfig
from jaxrl.tasks import (
    CurriculumSampler,
    Pool,
    PoolsSampler,
    SequentialSampler,
    TaskSampler,
    UniformSampler,
    build_task_sampler,
)
from jaxrl.tasks.checked import CheckedSampler

Make = Callable[[list], TaskSampler]
POOLS = [Pool("hard", 0.2, 0.5), Pool("medium", 0.8, 1.0), Pool("easy", math.inf, 0.1)]
FIXED: dict[str, Make] = {"sequential": SequentialSampler, "uniform": lambda tasks: UniformSampler(tasks, rng_seed=5)}
LEARNING: dict[str, Make] = {
    "curriculum": lambda tasks: CurriculumSampler(tasks, group_size=4, rng_seed=5),
    "curriculum by id": lambda tasks: CurriculumSampler(tasks, group_size=4, key="id", rng_seed=5),
    "curriculum by variance": lambda tasks: CurriculumSampler(tasks, group_size=4, rng_seed=5, signal="variance", signal_tolerance=0.1),
    "pools": lambda tasks: PoolsSampler(tasks, POOLS, rng_seed=5),
}
EVERY = {**FIXED, **LEARNING, "checked": lambda tasks: CheckedSampler(LEARNING["curriculum"](tasks), tasks, "my:sampler")}
every_sampler = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())
fixed_sampler = pytest.mark.parametrize("make", FIXED.values(), ids=FIXED.keys())
learning_sampler = pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING.keys())
fast = settings(max_examples=25, deadline=None)

rewards_of_a_group = st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0, None, math.nan]), min_size=1, max_size=4)
events = st.lists(st.one_of(st.integers(0, 5), st.tuples(st.integers(0, 6), rewards_of_a_group)), max_size=14)
"""What happens to a sampler: so many draws, or a group of a task (modulo their number) with its rewards."""


def happen(sampler: TaskSampler, happened: list, n: int, with_costs: bool = False) -> list:
    """Let draws and updates happen to a sampler of `n` tasks, and return the draws."""
    drawn = []
    for event in happened:
        if isinstance(event, int):
            drawn += sampler.sample(event)
        else:
            rewards = event[1]
            sampler.update(specs(n)[event[0] % n], rewards, [2.5 + len(drawn)] * len(rewards) if with_costs else None)
    return drawn


def specs(n: int) -> list[dict]:
    return [{"id": f"t{i}", "question": f"q{i}", "difficulty": i % 3} for i in range(n)]


@every_sampler
def test_it_implements_the_protocol(make: Make) -> None:
    sampler = make(specs(3))
    assert isinstance(sampler, TaskSampler) and iter(sampler) is sampler
    assert next(sampler) in specs(3) and sampler.sample(0) == []
    with pytest.raises(ValueError, match="cannot draw -1"):
        sampler.sample(-1)


@every_sampler
@fast
@given(n=st.integers(1, 7), before=events, after=events, with_costs=st.booleans())
def test_a_restart_at_any_point_through_json_changes_no_draw_and_no_metric(
    make: Make, n: int, before: list, after: list, with_costs: bool
) -> None:
    sampler, restored = make(specs(n)), make(specs(n))
    happen(sampler, before, n, with_costs)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict(), allow_nan=False)))
    assert restored.metrics() == sampler.metrics() and restored.state_dict() == sampler.state_dict()
    assert happen(restored, after, n, with_costs) == happen(sampler, after, n, with_costs)
    assert restored.sample(20) == sampler.sample(20)
    assert restored.metrics() == sampler.metrics() and restored.state_dict() == sampler.state_dict()


@every_sampler
@fast
@given(n=st.integers(1, 7), before=events, parts=st.lists(st.integers(0, 9), max_size=6))
def test_drawing_at_once_and_one_by_one_give_the_same_sequence_whatever_was_learnt(
    make: Make, n: int, before: list, parts: list[int]
) -> None:
    together, apart = make(specs(n)), make(specs(n))
    happen(together, before, n)
    happen(apart, before, n)
    assert together.sample(sum(parts)) == [task for part in parts for task in apart.sample(part)]
    assert next(together) == apart.sample(1)[0] and together.state_dict() == apart.state_dict()


@every_sampler
@fast
@given(n=st.integers(1, 7), happened=events, free=st.booleans())
def test_costs_never_change_a_draw(make: Make, n: int, happened: list, free: bool) -> None:
    costly, plain = make(specs(n)), make(specs(n))
    assert happen(costly, happened, n, with_costs=True) == happen(plain, happened, n)
    assert costly.sample(20) == plain.sample(20)
    assert {name: value for name, value in costly.metrics().items() if "cost" not in name} == plain.metrics()


@every_sampler
@fast
@given(n=st.integers(1, 7), happened=events, random=st.randoms(use_true_random=False))
def test_the_order_of_rewards_inside_a_group_does_not_matter(make: Make, n: int, happened: list, random) -> None:  # type: ignore[no-untyped-def]
    one, other = make(specs(n)), make(specs(n))
    mixed = [event if isinstance(event, int) else (event[0], random.sample(event[1], len(event[1]))) for event in happened]
    assert happen(one, happened, n) == happen(other, mixed, n) and one.state_dict() == other.state_dict()


@learning_sampler
@fast
@given(n=st.integers(1, 7), groups=st.lists(st.tuples(st.integers(0, 6), rewards_of_a_group), max_size=14))
def test_missing_rewards_teach_what_their_absence_would(make: Make, n: int, groups: list) -> None:
    with_them, without = make(specs(n)), make(specs(n))
    num_missing = 0
    for task, rewards in groups:
        scored = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
        num_missing += len(rewards) - len(scored)
        with_them.update(specs(n)[task % n], rewards)
        without.update(specs(n)[task % n], scored or [None])
    assert with_them.sample(30) == without.sample(30)
    assert with_them.metrics()["missing_rewards"] == num_missing


@fixed_sampler
def test_updates_never_change_a_draw(make: Make) -> None:
    quiet, updated = make(specs(5)), make(specs(5))
    drawn = []
    for _ in range(12):
        task = next(updated)
        updated.update(task, [1.0, 0.0])
        drawn.append(task)
    assert drawn == quiet.sample(12)


@every_sampler
def test_specs_and_rewards_are_handed_out_and_taken_as_they_are(make: Make) -> None:
    tasks = specs(3)
    original = copy.deepcopy(tasks)
    sampler = make(tasks)
    drawn = sampler.sample(30)
    assert {id(task) for task in drawn} == {id(task) for task in tasks}
    rewards, costs = [1.0, None], [3.0, 4.0]
    sampler.update(drawn[0], rewards, costs)
    sampler.metrics()
    assert tasks == original and (rewards, costs) == ([1.0, None], [3.0, 4.0])


@every_sampler
@pytest.mark.parametrize("damage", ["tasks", "order", "content", "kind", "unknown", "counters", "lacking", "none"])
def test_a_state_of_other_tasks_is_refused_and_changes_nothing(make: Make, damage: str) -> None:
    sampler = make(specs(4))
    sampler.sample(3)
    sampler.update(specs(4)[0], [1.0, 0.0])
    before = sampler.state_dict()
    other = {"tasks": specs(5), "order": specs(4)[::-1], "content": [{**spec, "question": "?"} for spec in specs(4)]}
    state: object = make(other.get(damage, specs(4))).state_dict()
    if damage == "kind":
        state = {**before, "type": "other"}
    if damage == "unknown":
        state = {**before, "more": 1}
    if damage == "lacking":
        state = {key: value for key, value in before.items() if key != "counters"}
    if damage == "counters":
        state = {**before, "counters": {"groups": 1}}
    if damage == "none":
        state = None
    with pytest.raises(ValueError, match=r"state|keys"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@every_sampler
def test_an_update_of_an_unknown_task_is_a_key_error(make: Make) -> None:
    with pytest.raises(KeyError, match="'t9'"):
        make(specs(3)).update({"id": "t9"}, [1.0])


@every_sampler
def test_tasks_may_be_any_json_value_and_must_differ(make: Make) -> None:
    sampler = make([0, "0", [0], {"a": 0}, None])
    for task in sampler.sample(5):
        sampler.update(task, [1.0])
    assert sampler.metrics()["groups"] == 5
    with pytest.raises(ValueError, match="two tasks have the id 'x'"):
        make([{"id": "x"}, {"id": "x", "other": 1}])
    with pytest.raises(ValueError, match="at least one task"):
        make([])


def test_sequential_goes_through_the_list_and_starts_again() -> None:
    tasks = specs(3)
    assert SequentialSampler(tasks).sample(7) == [*tasks, *tasks, tasks[0]]


@pytest.mark.parametrize(
    ("name", "cursor"), [("sequential", -1), ("sequential", 1.0), ("sequential", True), ("uniform", 4), ("uniform", "1")]
)
def test_a_cursor_that_cannot_be_is_refused_and_changes_nothing(name: str, cursor: object) -> None:
    sampler = FIXED[name](specs(4))
    sampler.sample(2)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="cursor"):
        sampler.load_state_dict({**before, "cursor": cursor})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(("name", "value"), [("groups", -1), ("episodes", 1.5), ("signal_groups", "1"), ("cost", -1.0), ("cost", math.nan)])
def test_counters_that_cannot_be_are_refused(name: str, value: object) -> None:
    state = SequentialSampler(specs(2)).state_dict()
    with pytest.raises(ValueError, match=f"counter {name!r} is"):
        SequentialSampler(specs(2)).load_state_dict({**state, "counters": {**state["counters"], name: value}})


def test_sequential_plays_each_task_under_each_seed_and_counts_them_all_for_the_task() -> None:
    tasks = [{"id": "a", "x": 1}, {"y": 2}]
    sampler = SequentialSampler(tasks, seeds=[7, 0], repeat=False)
    assert sampler.sample(3) == [{"id": "a", "x": 1, "seed": 7}, {"id": "a", "x": 1, "seed": 0}, {"y": 2, "seed": 7}]
    restored = SequentialSampler(tasks, seeds=[7, 0], repeat=False)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert restored.sample(9) == [{"y": 2, "seed": 0}] and restored.sample(1) == []
    for spec in SequentialSampler(tasks, seeds=[7, 0], repeat=False):
        sampler.update(spec, [1.0])
    assert sampler.metrics()["groups"] == 4 and tasks == [{"id": "a", "x": 1}, {"y": 2}]
    assert [spec["seed"] for spec in SequentialSampler(tasks, seeds=[7, 0]).sample(6)] == [7, 0, 7, 0, 7, 0]
    assert SequentialSampler(tasks, seeds=[7, 0]).sample(6)[4] == {"id": "a", "x": 1, "seed": 7}
    with pytest.raises(ValueError, match="'repeat' is False, expected True"):
        SequentialSampler(tasks, seeds=[7, 0]).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="'seeds' is"):
        SequentialSampler(tasks).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("tasks", "seeds", "message"),
    [
        ([{"id": "a"}], [], "at least one integer"),
        ([{"id": "a"}], [1, 1], "each once"),
        ([{"id": "a"}], [True], "integer"),
        ([{"id": "a", "seed": 3}], [0], "has one"),
        (["a"], [0], "has no keys"),
    ],
)
def test_seeds_that_a_task_has_no_place_for_are_refused(tasks: list, seeds: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequentialSampler(tasks, seeds=seeds)


def test_sequential_without_repeat_gives_the_rest_and_stops() -> None:
    tasks = specs(3)
    sampler = SequentialSampler(tasks, repeat=False)
    assert next(sampler) == tasks[0]
    assert sampler.sample(5) == tasks[1:] and sampler.sample(5) == []
    with pytest.raises(StopIteration):
        next(sampler)
    assert list(SequentialSampler(tasks, repeat=False)) == tasks


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 9), epochs=st.integers(1, 4), rng_seed=st.integers(0, 2**31))
def test_uniform_draws_a_permutation_in_every_epoch_and_counts_differ_by_one_at_most(n: int, epochs: int, rng_seed: int) -> None:
    sampler = UniformSampler(specs(n), rng_seed)
    counts: Counter[str] = Counter({f"t{i}": 0 for i in range(n)})
    for _ in range(epochs):
        epoch = []
        for _ in range(n):
            epoch.append(next(sampler)["id"])
            counts[epoch[-1]] += 1
            assert max(counts.values()) - min(counts.values()) <= 1
        assert sorted(epoch) == sorted(counts)


def test_uniform_orders_differ_between_epochs_and_seeds_and_repeat_with_the_seed() -> None:
    a, b, other = UniformSampler(specs(20), 1), UniformSampler(specs(20), 1), UniformSampler(specs(20), 2)
    first, second = a.sample(20), a.sample(20)
    assert first == b.sample(20) and first != second and first != other.sample(20) and first != specs(20)


def test_uniform_refuses_the_state_of_another_seed_and_a_negative_seed() -> None:
    with pytest.raises(ValueError, match="'rng_seed' is 1, expected 2"):
        UniformSampler(specs(3), 2).load_state_dict(UniformSampler(specs(3), 1).state_dict())
    with pytest.raises(ValueError, match="cursor 3 of 3"):
        UniformSampler(specs(3), 1).load_state_dict({**UniformSampler(specs(3), 1).state_dict(), "cursor": 3})
    with pytest.raises(ValueError, match="rng_seed"):
        UniformSampler(specs(3), -1)


def test_a_config_builds_its_sampler() -> None:
    sequential = build_task_sampler(SequentialTasksConfig(), specs(3), 7, group_size=8)
    uniform = build_task_sampler(UniformTasksConfig(), specs(3), 7, group_size=8)
    assert isinstance(sequential, SequentialSampler) and sequential.sample(4)[3] == specs(3)[0]
    assert isinstance(uniform, UniformSampler) and uniform.sample(9) == UniformSampler(specs(3), 7).sample(9)
