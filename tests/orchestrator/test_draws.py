import json

import pytest

from jaxrl.config.algorithm import GRPOConfig
from jaxrl.orchestrator.algo import GRPO
from jaxrl.orchestrator.draws import Draw, DrawSource, pick_index
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.tasks import UniformSampler
from tests.fakes import ScriptedPool, ToyEnv


def _envs(ratios: dict[str, float], num_tasks: int = 4) -> list[TrainEnv]:
    algorithm = GRPO(GRPOConfig(), ScriptedPool())
    return [
        TrainEnv(name, ratio, UniformSampler(ToyEnv(name, num_tasks=num_tasks).tasks(), rng_seed=i), None, algorithm)
        for i, (name, ratio) in enumerate(ratios.items())
    ]


def test_environments_are_drawn_in_proportion_to_their_ratios():
    source = DrawSource(_envs({"a": 1.0, "b": 3.0}), seed=1)
    names = [source.draw().env_name for _ in range(400)]
    assert 270 < names.count("b") < 330


def test_each_environment_counts_its_own_draws_and_plays_every_task_once_per_epoch():
    source = DrawSource(_envs({"a": 1.0, "b": 1.0}), seed=0)
    draws = [source.draw() for _ in range(40)]
    for name in ("a", "b"):
        own = [d for d in draws if d.env_name == name]
        assert [d.draw_index for d in own] == list(range(len(own)))
        assert sorted(d.spec["id"] for d in own[:4]) == [f"{name}-{i}" for i in range(4)]


def test_a_pick_depends_on_seed_and_count_alone():
    picks = [pick_index([1.0, 1.0, 1.0], seed=7, num_draws=n) for n in range(20)]
    assert picks == [pick_index([1.0, 1.0, 1.0], seed=7, num_draws=n) for n in range(20)]
    assert picks != [pick_index([1.0, 1.0, 1.0], seed=8, num_draws=n) for n in range(20)]


@pytest.mark.parametrize("num_before", [0, 3, 11])
def test_a_restored_source_goes_on_where_it_was(num_before):
    source = DrawSource(_envs({"a": 1.0, "b": 2.0}), seed=3)
    for _ in range(num_before):
        source.draw()
    state = json.loads(json.dumps(source.state_dict()))
    expected = [source.draw() for _ in range(10)]
    restored = DrawSource(_envs({"a": 1.0, "b": 2.0}), seed=3)
    restored.load_state_dict(state, [])
    assert [restored.draw() for _ in range(10)] == expected


def test_draws_to_be_repeated_come_first_and_as_they_were():
    source = DrawSource(_envs({"a": 1.0}), seed=0)
    first = [source.draw() for _ in range(3)]
    state = source.state_dict()
    following = source.draw()
    restored = DrawSource(_envs({"a": 1.0}), seed=0)
    restored.load_state_dict(state, first[1:])
    assert restored.to_redraw == first[1:]
    assert [restored.draw() for _ in range(3)] == [*first[1:], following]


def test_a_state_of_other_environments_is_refused():
    state = DrawSource(_envs({"a": 1.0}), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"environments \['a'\], but the run has \['b'\]"):
        DrawSource(_envs({"b": 1.0}), seed=0).load_state_dict(state, [Draw("a", {}, 0)])


def test_a_state_of_other_tasks_is_refused_with_the_name_of_the_environment():
    state = DrawSource(_envs({"a": 1.0}), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"environment 'a': .*'tasks'"):
        DrawSource(_envs({"a": 1.0}, num_tasks=5), seed=0).load_state_dict(state, [])
