"""What every task sampler promises, and the order of each; the properties hold for all of them."""

import copy
import json
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.tasks import SequentialTasksConfig, UniformTasksConfig
from jaxrl.tasks import SequentialSampler, TaskSampler, UniformSampler, build_task_sampler

Make = Callable[[list], TaskSampler]
EVERY = {"sequential": SequentialSampler, "uniform": lambda tasks: UniformSampler(tasks, rng_seed=5)}
every_sampler = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


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
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 7), parts=st.lists(st.integers(0, 9), max_size=6))
def test_drawing_at_once_and_one_by_one_give_the_same_sequence(make: Make, n: int, parts: list[int]) -> None:
    together, apart = make(specs(n)), make(specs(n))
    assert together.sample(sum(parts)) == [task for part in parts for task in apart.sample(part)]
    assert next(together) == apart.sample(1)[0]


@every_sampler
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 7),
    before=st.integers(0, 20),
    updates=st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=4), max_size=4),
)
def test_a_saved_state_survives_json_and_continues_with_the_same_draws_and_counts(
    make: Make, n: int, before: int, updates: list[list[float | None]]
) -> None:
    sampler = make(specs(n))
    for rewards in updates:
        sampler.update(sampler.sample(1)[0], rewards, [2.0] * len(rewards))
    sampler.sample(before)
    restored = make(specs(n))
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert restored.metrics() == sampler.metrics() and restored.state_dict() == sampler.state_dict()
    assert restored.sample(20) == sampler.sample(20)
    for each in (restored, sampler):
        each.update(specs(n)[0], [1.0, 0.0], [1.0, 1.0])
    assert restored.metrics() == sampler.metrics()


@every_sampler
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
    drawn = sampler.sample(3)
    assert {id(task) for task in drawn} == {id(task) for task in tasks}
    rewards, costs = [1.0, None], [3.0, 4.0]
    sampler.update(drawn[0], rewards, costs)
    sampler.metrics()
    assert tasks == original and (rewards, costs) == ([1.0, None], [3.0, 4.0])


@every_sampler
@pytest.mark.parametrize("damage", ["tasks", "order", "content", "kind", "cursor", "counters", "none"])
def test_a_state_of_other_tasks_is_refused_and_changes_nothing(make: Make, damage: str) -> None:
    sampler = make(specs(4))
    sampler.sample(3)
    sampler.update(specs(4)[0], [1.0, 0.0])
    before = sampler.state_dict()
    other = {"tasks": specs(5), "order": specs(4)[::-1], "content": [{**spec, "question": "?"} for spec in specs(4)]}
    state: object = make(other.get(damage, specs(4))).state_dict()
    if damage == "kind":
        state = {**before, "type": "curriculum"}
    if damage == "cursor":
        state = {**before, "cursor": -1}
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
    sequential = build_task_sampler(SequentialTasksConfig(), specs(3), 7)
    uniform = build_task_sampler(UniformTasksConfig(), specs(3), 7)
    assert isinstance(sequential, SequentialSampler) and sequential.sample(4)[3] == specs(3)[0]
    assert isinstance(uniform, UniformSampler) and uniform.sample(9) == UniformSampler(specs(3), 7).sample(9)
