"""What is going to be played: names, order, and what sampling depends on."""

import copy

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.errors import ConfigError
from jaxrl.evals.plan import first_difference, plan_episodes, plan_record
from jaxrl.inference.endpoint import sampling_seed
from tests.evals.worlds import Sums, asking, harness, right_below_four
from tests.fakes import ScriptedEndpoint

WARM = SamplingConfig(temperature=0.7, max_tokens=16)


def test_tasks_come_first_then_seeds_then_samples() -> None:
    plan = plan_episodes(Sums(3), asking(limit=2, seeds=(4, 0), samples_per_task=2, sampling=WARM).eval_parameters)
    assert [episode.episode_id for episode in plan] == [
        *("s0|s4|n0", "s0|s4|n1", "s0|s0|n0", "s0|s0|n1"),
        *("s1|s4|n0", "s1|s4|n1", "s1|s0|n0", "s1|s0|n1"),
    ]
    assert [episode.position for episode in plan] == list(range(8))
    assert [(episode.draw_index, episode.sample) for episode in plan] == [(q, n) for q in range(4) for n in range(2)]


def test_without_seeds_the_specs_are_the_environments_own() -> None:
    env = Sums(2)
    plan = plan_episodes(env, asking().eval_parameters)
    assert [episode.episode_id for episode in plan] == ["s0|n0", "s1|n0"]
    assert all(episode.task.spec is spec for episode, spec in zip(plan, env.tasks(), strict=True))


def test_tasks_that_differ_in_their_seeds_alone_have_no_other_seeds() -> None:
    env = Sums(2)
    env.tasks()[:] = [{"id": "seed-4", "seed": 4}, {"id": "seed-5", "seed": 5}]
    assert len(plan_episodes(env, asking().eval_parameters)) == 2
    with pytest.raises(ConfigError, match=r"tasks 'seed-4' and 'seed-5' differ in their seeds alone \(4 and 5\)"):
        plan_episodes(env, asking(seeds=(0, 1)).eval_parameters)
    env.tasks()[:] = [{"id": "a", "seed": 4}, {"id": "b", "seed": 4}]
    assert len(plan_episodes(env, asking(seeds=(0, 1)).eval_parameters)) == 4


async def test_a_seed_is_in_a_copy_of_the_spec_and_the_tasks_stay_as_they_were() -> None:
    env = Sums(2, fields={"seed": 99})
    before = copy.deepcopy(env.tasks())
    result = await harness(env).run(asking(seeds=(7, 8)))
    assert [spec["seed"] for spec in env.played] == [7, 8, 7, 8] and env.tasks() == before
    assert [row["seed"] for row in result.rows] == [7, 8, 7, 8]
    assert {row["task_id"] for row in result.rows} == {"s0", "s1"}


def test_index_and_split_are_the_specs_own_where_it_has_them() -> None:
    (told,) = plan_episodes(Sums(1, fields={"index": 41, "split": "train"}), asking(split="test").eval_parameters)
    assert (told.index, told.split) == (41, "train")
    untold = plan_episodes(Sums(2), asking(split="test", seeds=(0, 1)).eval_parameters)
    assert [(episode.index, episode.split) for episode in untold] == [(0, "test"), (0, "test"), (1, "test"), (1, "test")]


async def test_sampling_seeds_are_told_from_question_and_sample_alone() -> None:
    endpoint = ScriptedEndpoint(right_below_four)
    await harness(Sums(2), endpoint, concurrency=3).run(asking(seeds=(5, 6), samples_per_task=2, sampling=WARM), step=3)
    seeds = {request.request_id.split("/")[4]: request.sampling.seed for request in endpoint.requests}
    assert seeds == {str(2 * q + n): sampling_seed(11, "eval:sums", q, n, 0) for q in range(4) for n in range(2)}


def test_two_tasks_of_one_id_are_refused() -> None:
    env = Sums(2)
    env.tasks()[1]["id"] = "s0"
    with pytest.raises(ConfigError, match=r"env 'sums': two tasks have the id 's0' \(the second at index 1\)"):
        plan_episodes(env, asking().eval_parameters)


def test_the_record_of_a_plan_tells_other_tasks_and_other_settings_apart() -> None:
    def record(env: Sums, **parameters: object) -> dict:
        config = asking(**parameters)
        plan = plan_episodes(env, config.eval_parameters)
        return plan_record(config, plan, step=0, history="template", has_demonstrations=False)

    base = record(Sums(3))
    assert record(Sums(3)) == base
    assert first_difference(base, record(Sums(3), limit=2)) == "`config.eval_parameters.limit` is null there and 2 here"
    other = record(Sums(3, fields={"b": 1}))
    assert other["sha"] != base["sha"] and first_difference(base, other).startswith("`tasks_sha` is")
    assert first_difference({"a": 1}, {}) == "`a` is 1 there and absent here" and first_difference(base, base) is None


async def test_a_task_that_is_no_json_is_a_mistake_of_the_environment_in_words() -> None:
    with pytest.raises(ConfigError, match="env 'sums': a task must be a JSON value"):
        await harness(Sums(2, fields={"seen": {1, 2}})).run(asking())
    result = await harness(Sums(2, fields={"weight": float("nan")})).run(asking())
    assert result.scores["n_scored"] == 2
