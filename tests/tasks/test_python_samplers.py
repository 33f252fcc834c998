"""Samplers of the user's own: what they are called with, what is watched, and every way to get one wrong, in words."""

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import pytest

from jaxrl.config.tasks import PythonTasksConfig
from jaxrl.errors import ConfigError
from jaxrl.tasks import FiniteSampler, SequentialSampler, TaskSampler, TaskSpec, UniformSampler, build_task_sampler
from jaxrl.tasks.checked import CheckedSampler

HERE = __name__
TASKS = [{"id": name} for name in "abc"]


class Plain:
    """Implements the protocol by itself, counts nothing, and shows what it was called with."""

    def __init__(self, tasks: list[TaskSpec], rng_seed: int, *, group_size: int, more: int = 0) -> None:
        self.tasks, self.called_with, self.at = tasks, (rng_seed, group_size, more), 0
        self.seen: list[Any] = []
        self.drawn: Any = None
        self.state: Any = None
        self.reported: Any = {"plain": 1}

    def sample(self, n: int) -> Any:
        self.at += n
        return self.tasks[:n] if self.drawn is None else self.drawn

    def __iter__(self) -> Iterator[TaskSpec]:
        return self

    def __next__(self) -> TaskSpec:
        return self.sample(1)[0]

    def update(self, task: TaskSpec, rewards: Sequence[float | None], costs: Sequence[float] | None = None) -> None:
        self.seen.append((task, rewards, costs))

    def state_dict(self) -> Any:
        return {"at": self.at} if self.state is None else self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def metrics(self) -> Any:
        return self.reported


class Backwards(FiniteSampler):
    def __init__(self, tasks: Sequence[TaskSpec], rng_seed: int) -> None:
        super().__init__(tasks, "backwards", rng_seed=rng_seed)
        self.num_draws = 0

    def next_index(self) -> int:
        self.num_draws += 1
        return -self.num_draws % len(self.tasks)

    def memory(self) -> dict[str, Any]:
        return {"num_draws": self.num_draws}

    def remember(self, memory: Any) -> None:
        self.num_draws = memory["num_draws"]


class RemembersATuple(Plain):
    def state_dict(self) -> Any:
        return {"random": random.Random(0).getstate()}


class RemembersAGenerator(Backwards):
    def memory(self) -> dict[str, Any]:
        return {"tries": list(range(200)), "seen": {"by": [1, random.Random(0)]}}


class LearnsLater(Backwards):
    async def learn(self, group: Any) -> None:  # type: ignore[override]
        self.num_draws += 1


class UpdatesLater(Plain):
    async def update(self, task: TaskSpec, rewards: Any, costs: Any = None) -> None:  # type: ignore[override]
        self.seen.append(task)


class SamplesInBits(Plain):
    async def sample(self, n: int) -> Any:  # type: ignore[override]
        yield self.tasks[0]


class RemembersNothing(Plain):
    def state_dict(self) -> Any:
        raise LookupError("not yet")


def anything(tasks: list[TaskSpec], **given: Any) -> TaskSampler:
    return UniformSampler(tasks, given.pop("rng_seed") + len(given))


def takes_nothing() -> TaskSampler:
    return UniformSampler(TASKS)


def returns_a_class(tasks: list[TaskSpec], rng_seed: int) -> Any:
    return UniformSampler


def returns_none(tasks: list[TaskSpec], rng_seed: int) -> None:
    return None


async def waits(tasks: list[TaskSpec], rng_seed: int) -> TaskSampler:
    return UniformSampler(TASKS)


def raises(tasks: list[TaskSpec], rng_seed: int) -> TaskSampler:
    raise KeyError("level")


def leaves(tasks: list[TaskSpec], rng_seed: int) -> TaskSampler:
    sys.exit(3)


def refuses(tasks: list[TaskSpec], rng_seed: int) -> TaskSampler:
    raise ConfigError("these tasks have no level")


NO_SAMPLER = 3


def built(name: str, **kwargs: Any) -> TaskSampler:
    config = PythonTasksConfig(import_path=f"{HERE}:{name}", kwargs=kwargs)
    return build_task_sampler(config, TASKS, 7, group_size=8, success_threshold=0.5)


def plain() -> tuple[Plain, CheckedSampler]:
    inner = Plain(list(TASKS), 0, group_size=8)
    return inner, CheckedSampler(inner, TASKS, "my:Plain")


def test_it_is_called_with_the_tasks_the_seed_and_what_it_takes() -> None:
    sampler = built("Plain", more=2)
    assert isinstance(sampler, CheckedSampler) and isinstance(sampler, TaskSampler)
    assert sampler._sampler.called_with == (7, 8, 2)  # type: ignore[attr-defined]
    assert built("Plain", group_size=3)._sampler.called_with == (7, 3, 0)  # type: ignore[attr-defined]
    assert built("anything").state_dict()["state"]["rng_seed"] == 9, "it takes any name, and two were offered"
    assert built("Backwards").sample(4) == [TASKS[2], TASKS[1], TASKS[0], TASKS[2]]


def test_a_sampler_of_jaxrl_may_be_named_too() -> None:
    config = PythonTasksConfig(import_path="jaxrl.tasks:CurriculumSampler", kwargs={"key": "id", "gamma": 0.5})
    state = build_task_sampler(config, TASKS, 7, group_size=8, success_threshold=0.5).state_dict()["state"]
    assert (state["group_size"], state["success_threshold"], state["gamma"], state["rng_seed"]) == (8, 0.5, 0.5, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", "cannot be imported"),
        ("NO_SAMPLER", "is a int; name a class or a function"),
        ("takes_nothing", r"was called with \(tasks, rng_seed=\.\.\.\) and raised TypeError"),
        ("raises", r"was called with \(tasks, rng_seed=\.\.\.\) and raised KeyError: 'level' \(.*test_python_samplers\.py"),
        ("leaves", "raised SystemExit: 3"),
        ("returns_none", "returned a NoneType, which is no task sampler: it has no method `sample`"),
        ("returns_a_class", "returned the class UniformSampler, which is no task sampler; derive"),
        ("waits", "returned a coroutine, which is no task sampler"),
        ("RemembersATuple", "must return a JSON value.*a tuple becomes a list"),
        ("RemembersAGenerator", r"can hold it: `seen\.by\[1\]` is a Random, <random\.Random"),
        ("LearnsLater", "`learn` of LearnsLater is an `async def`, which nothing waits for, so it would never run"),
        ("UpdatesLater", "`update` of UpdatesLater is an `async def`"),
        ("SamplesInBits", "`sample` of SamplesInBits is an `async def`"),
        ("RemembersNothing", "its state cannot be asked for: LookupError: not yet"),
    ],
)
def test_what_is_no_sampler_is_refused_in_words(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`tasks.import_path`='{HERE}:{name}'.*{message}"):
        built(name)


def test_a_mistake_that_it_tells_of_itself_is_told_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^these tasks have no level$"):
        built("refuses")


@pytest.mark.parametrize("name", ["tasks", "rng_seed"])
def test_what_the_run_sets_itself_cannot_be_set_again(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`tasks.kwargs` holds a `{name}`"):
        built("Plain", **{name: 1})


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ([{"id": "z"}], "which is none of its 3 tasks"),
        ([{"name": "a"}], "which is none of its 3 tasks"),
        ([{1, 2}], "which is none of its 3 tasks"),
        ([None], "which is none of its 3 tasks"),
        (TASKS[:2], "returned 2 tasks; expected 1"),
        (TASKS[0], "returned a dict; expected a list of 1 tasks"),
    ],
)
def test_a_draw_that_is_no_task_of_the_list_is_refused(drawn: object, message: str) -> None:
    inner, sampler = plain()
    inner.drawn = drawn
    for draw in (lambda: sampler.sample(1), lambda: next(sampler)):
        with pytest.raises(ValueError, match=rf"`sample\(1\)` of my:Plain.*{message}"):
            draw()


def test_a_copy_of_a_task_with_more_in_it_is_still_that_task() -> None:
    inner, sampler = plain()
    inner.drawn = ({"id": "b", "seed": 3},)
    assert sampler.sample(1) == [{"id": "b", "seed": 3}]


def test_the_end_of_its_tasks_is_the_end_of_its_draws() -> None:
    sampler = CheckedSampler(SequentialSampler(TASKS, repeat=False), TASKS, "my:sampler")
    assert sampler.sample(5) == TASKS and sampler.sample(5) == []
    with pytest.raises(StopIteration):
        next(sampler)


def test_groups_are_counted_for_it_and_handed_on_as_they_came() -> None:
    inner, sampler = plain()
    sampler.update(TASKS[1], (1.0, None, 0.0), (1.0, 2.0, 3.0))
    assert inner.seen == [(TASKS[1], [1.0, None, 0.0], [1.0, 2.0, 3.0])]
    inner.reported = {"plain": 0.5, "episodes": 9}
    assert sampler.metrics() == {
        "groups": 1, "signal_groups": 1, "unscored_groups": 0, "episodes": 9, "scored_episodes": 2, "missing_rewards": 1, "cost": 6,
        "zero_signal_fraction": 0, "signal_groups_per_episode": 1 / 3, "signal_groups_per_cost": 1 / 6, "plain": 0.5,
    }  # fmt: skip
    with pytest.raises(KeyError, match="'z' is not one of the sampler's 3 tasks"):
        sampler.update({"id": "z"}, [1.0])
    with pytest.raises(ValueError, match="for every group or for none"):
        sampler.update(TASKS[0], [1.0])
    assert len(inner.seen) == 1


@pytest.mark.parametrize("state", [{1: 2}, {"a": (1, 2)}, {"a": {1, 2}}, {"a": math.nan}, {"a": object()}, b"bytes"], ids=repr)
def test_a_state_that_json_would_not_give_back_is_refused(state: object) -> None:
    inner, sampler = plain()
    inner.state = state
    with pytest.raises(ValueError, match=r"`state_dict\(\)` of my:Plain must return a JSON value"):
        sampler.state_dict()


def test_a_state_is_a_copy_that_nothing_changes_afterwards() -> None:
    inner, sampler = plain()
    inner.state = {"seen": ["a"]}
    state = sampler.state_dict()
    inner.state["seen"].append("b")
    assert state["state"] == {"seen": ["a"]}


def test_a_restart_gives_it_its_own_state_and_the_counters_theirs() -> None:
    _, sampler = plain()
    sampler.sample(2)
    sampler.update(TASKS[0], [1.0])
    state = json.loads(json.dumps(sampler.state_dict()))
    inner, restored = plain()
    restored.load_state_dict(state)
    assert inner.at == 2 and restored.metrics() == sampler.metrics()


def test_a_state_that_holds_itself_is_refused_with_where_it_does() -> None:
    inner, sampler = plain()
    inner.state = {"again": []}
    inner.state["again"].append(inner.state)
    with pytest.raises(ValueError, match=r"`again\[0\]\.again.*goes deeper"):
        sampler.state_dict()


@pytest.mark.parametrize("index", [10**9, 1.0, None])
def test_an_index_that_is_none_is_refused_with_the_method_that_gave_it(index: Any) -> None:
    sampler = Backwards(TASKS, 0)
    sampler.next_index = lambda: index  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=rf"`next_index` of Backwards returned {index}; expected an index into its 3 tasks, .* 0 to 2"):
        sampler.sample(1)


def test_the_state_of_other_kwargs_is_refused_with_the_one_that_differs_and_holds_no_value_of_them() -> None:
    made = {"more": 1, "since": date(2026, 1, 1), "key": "s3cr3t"}

    def sampler(**kwargs: Any) -> CheckedSampler:
        return CheckedSampler(Plain(list(TASKS), 0, group_size=8), TASKS, "my:Plain", kwargs)

    state = json.loads(json.dumps(sampler(**made).state_dict()))
    assert "s3cr3t" not in str(state)
    sampler(**made).load_state_dict(state)
    for other, name in (({**made, "more": 2}, "more"), ({**made, "new": None}, "new"), ({"more": 1, "since": made["since"]}, "key")):
        with pytest.raises(ValueError, match=rf"my:Plain was called with another `tasks\.kwargs\.{name}`"):
            sampler(**other).load_state_dict(state)
    with pytest.raises(ValueError, match="'kwargs' is None"):
        sampler().load_state_dict({**state, "kwargs": None})
    with pytest.raises(ValueError, match=r"another `tasks\.kwargs\.more`"):
        built("Plain", more=2).load_state_dict(built("Plain", more=1).state_dict())


@pytest.mark.parametrize("change", [{"tasks": "other"}, {"sampler": "my:Other"}, {"type": "uniform"}, {"counters": None}])
def test_the_state_of_another_sampler_or_of_other_tasks_never_reaches_it(change: dict) -> None:
    inner, sampler = plain()
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict({**sampler.state_dict(), **change, "state": {"at": 5}})
    assert inner.at == 0


@pytest.mark.parametrize("name", ["admission_frac", "missing_costs", "gate/mine/frac"])
def test_a_metric_that_the_run_reports_itself_is_refused(name: str) -> None:
    inner, sampler = plain()
    inner.reported = {name: 0.5}
    with pytest.raises(ValueError, match=rf"`metrics\(\)` of my:Plain holds '{name}', under which the run reports"):
        sampler.metrics()


@pytest.mark.parametrize("reported", [None, {"a": "1"}, {"a": math.nan}, {1: 1.0}], ids=repr)
def test_metrics_that_are_no_numbers_are_refused(reported: object) -> None:
    inner, sampler = plain()
    inner.reported = reported
    with pytest.raises(ValueError, match=r"`metrics\(\)` of my:Plain"):
        sampler.metrics()
