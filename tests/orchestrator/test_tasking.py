"""Drawing tasks, learning from groups, asking gates: what samplers and gates are told, and what becomes of a run when one of them fails."""

import asyncio
import json

import pytest

from jaxrl.blame import component_of_error
from jaxrl.errors import CheckpointError, RunFailedError
from jaxrl.orchestrator.draws import DrawSource
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.tasking import CostReader, ask, draw_task, learn
from jaxrl.tasks import SequentialSampler, UniformSampler
from jaxrl.tasks.gates import PythonGate, RewardRangeGate
from tests.builders import make_group, make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env, make_run

SPECS = ToyEnv(num_tasks=4).tasks()


def env_with(tasks=None, **settings) -> TrainEnv:
    return make_env(ScriptedPool(), ToyEnv("sums"), tasks=tasks, **settings)


class Broken(SequentialSampler):
    """Fails in one of its methods, as the user's own sampler may."""

    def __init__(self, method: str, failure: object = None) -> None:
        super().__init__(SPECS)
        setattr(self, method, self.fail)
        self.failure = ZeroDivisionError("of mine") if failure is None else failure

    def fail(self, *args: object) -> object:
        if isinstance(self.failure, BaseException):
            raise self.failure
        return self.failure


@pytest.mark.parametrize("end", [SequentialSampler(SPECS[:2], repeat=False), Broken("sample", StopIteration()), Broken("sample", [])])
def test_a_sampler_without_another_task_says_so_in_words_and_is_blamed(end):
    env = env_with(end)
    with pytest.raises(RunFailedError, match=r"sampler of environment 'sums' has no task left, .* `run\.max_steps`") as caught:
        for _ in range(3):
            draw_task(env)
    assert component_of_error(caught.value) == "task sampler of environment 'sums'"


async def test_a_run_whose_tasks_end_too_early_fails_in_words_and_not_with_a_stop_iteration():
    tasks = SequentialSampler(SPECS[:3], repeat=False)
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(num_tasks=4), tasks=tasks)], max_steps=2)
    with pytest.raises(RunFailedError, match="has no task left"):
        await run.play()
    assert len(run.batches) == 1


@pytest.mark.parametrize("async_level", [0, 1])
async def test_a_run_with_exactly_as_many_tasks_as_it_needs_ends_well(async_level):
    tasks = SequentialSampler(SPECS, repeat=False)
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(num_tasks=4), tasks=tasks)], max_steps=2, async_level=async_level)
    await run.play()
    assert len(run.batches) == 2


@pytest.mark.parametrize(
    ("method", "failure", "words"),
    [
        ("sample", None, r"when it was asked for a task: ZeroDivisionError: of mine \(test_tasking\.py, line \d+, in fail\)"),
        ("sample", [1, 2], r"when it was asked for a task: ValueError: `sample\(1\)` returned 2 tasks"),
        ("sample", 7, r"when it was asked for a task: TypeError"),
        ("update", None, "when it was told of a group: ZeroDivisionError"),
        ("update", StopIteration(), "when it was told of a group: StopIteration"),
        ("metrics", None, "when it was asked for its metrics: ZeroDivisionError"),
        ("metrics", {"hardest": "sum-3"}, "when it was asked for its metrics: ValueError: .*'sum-3'"),
    ],
)
async def test_a_sampler_that_fails_ends_the_run_under_its_name(method, failure, words):
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(num_tasks=4), tasks=Broken(method, failure))])
    with pytest.raises(RunFailedError, match=f"sampler of environment 'toy' failed {words}") as caught:
        await asyncio.wait_for(run.play(), 10)
    assert component_of_error(caught.value) == "task sampler of environment 'toy'"


@pytest.mark.parametrize("failure", [None, {"seen": {1, 2}}, {"best": float("nan")}])
def test_a_sampler_without_a_state_that_a_checkpoint_can_hold_is_refused_before_anything_is_played(failure):
    with pytest.raises(RunFailedError, match=r"sampler of environment 'toy' failed when its? (state )?was") as caught:
        make_run(envs=lambda pool: [make_env(pool, tasks=Broken("state_dict", failure))])
    assert component_of_error(caught.value) == "task sampler of environment 'toy'"


def test_a_state_that_a_sampler_cannot_take_back_is_refused_with_its_environment():
    saved = make_run(envs=lambda pool: [make_env(pool)]).orchestrator.snapshot()
    run = make_run(envs=lambda pool: [make_env(pool, tasks=Broken("load_state_dict"))])
    with pytest.raises(CheckpointError, match="environment 'toy': its task sampler raised ZeroDivisionError: of mine; resume with"):
        run.orchestrator.restore(saved)


def test_costs_of_one_kind_do_not_go_on_as_costs_of_another():
    def source(**settings) -> DrawSource:
        return DrawSource([make_env(ScriptedPool(), ToyEnv("sums"), **settings)], seed=0)

    state = source(cost="service_spend").state_dict()
    with pytest.raises(
        ValueError, match=r"its costs were counted in 'service_spend' so far, but `tasks\.cost`='completion_tokens'"
    ):
        source().load_state_dict(state, [])
    source(cost="service_spend").load_state_dict(state, [])


def test_a_sampler_is_told_of_missing_rewards_as_missing_and_of_the_cost_of_every_rollout():
    rollouts = [make_rollout(1.0), make_rollout(None), make_rollout(0.0, with_samples=False), make_rollout(None)]
    rollouts[3].fail("env", ValueError("no"))
    tasks = UniformSampler(SPECS)
    env = env_with(tasks)
    costs, missing = CostReader().read(env, rollouts)
    learn(env, SPECS[0], rollouts, costs)
    assert (costs, missing) == ([3.0] * 4, None)
    seen = tasks.metrics()
    assert (seen["episodes"], seen["scored_episodes"], seen["missing_rewards"], seen["cost"]) == (4, 1, 3, 12)


def test_a_cost_that_nobody_told_counts_as_nothing_and_is_warned_of_once_with_the_numbers_that_there_are(caplog):
    env, reader = env_with(cost="service_spend"), CostReader()
    rollouts = make_group([1.0, 1.0, 1.0, None]).rollouts
    rollouts[0].metrics = {"service_spend": 0.25, "turns": 1.0}
    rollouts[1].metrics = {"turns": 2.0, "calls": 3.0}
    rollouts[2].metrics = {"service_spend": -1.0}
    rollouts[3].fail("env", ValueError("no"))
    for _ in range(2):
        assert reader.read(env, rollouts) == ([0.25, 0.0, 0.0, 0.0], 3)
    (message,) = caplog.messages
    assert "env 'sums', task 'task-0'" in message and "`tasks.cost`='service_spend'" in message and "(calls=3, turns=2)" in message


def test_of_a_rollout_that_failed_before_it_was_told_its_cost_nothing_is_said(caplog):
    rollout = make_rollout(None)
    rollout.fail("env", ValueError("no"))
    assert CostReader().read(env_with(cost="service_spend"), [rollout]) == ([0.0], 1)
    assert caplog.messages == []


async def test_a_reported_cost_is_counted_for_every_group_and_what_was_not_told_is_shown():
    class Spending(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            if spec["id"] == "toy-0":
                raise ValueError("the server fell over")
            return type(outcome)(reward=outcome.reward, metrics={"service_spend": 0.5})

    def envs(pool):
        environment = Spending(num_tasks=4)
        return [make_env(pool, environment, tasks=SequentialSampler(environment.tasks()), cost="service_spend")]

    run = make_run(envs=envs, max_steps=2)
    await run.play()
    first, second = (metrics for _, metrics in run.monitors.steps)
    names = ("missing_costs", "cost", "missing_rewards", "unscored_groups")
    # Each step draws three groups, one of which fails; what was not told is counted for the step, all else for the run.
    assert [first[f"tasks/toy/{name}"] for name in names] == [4, 4.0, 4, 1]
    assert [second[f"tasks/toy/{name}"] for name in names] == [4, 8.0, 8, 2]


def rollouts_of(*rewards: float):
    group = make_group(rewards)
    for rollout in group.rollouts:
        rollout.assign_advantages(rollout.reward - sum(rewards) / len(rewards))
    return group.rollouts


def test_every_gate_is_asked_whatever_the_first_one_says():
    asked = []

    def mine(rollouts):
        asked.append(len(rollouts))
        return True

    gates = (RewardRangeGate(0.9, 1.0), PythonGate("mine", mine, "my.gates:mine"))
    assert ask(env_with(gates=gates), rollouts_of(0.0, 1.0)) == {"reward_range": False, "mine": True}
    assert asked == [2]
    assert ask(env_with(), rollouts_of(0.0)) == {}


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, r"TypeError: `my\.gates:mine` returned None"), (1, "TypeError"), (LookupError("no such key"), "LookupError: no such key")],
)
def test_a_gate_that_fails_ends_the_run_under_its_name_and_that_of_its_environment(answer, words):
    def mine(rollouts):
        if isinstance(answer, Exception):
            raise answer
        return answer

    env = env_with(gates=(PythonGate("mine", mine, "my.gates:mine"),))
    with pytest.raises(
        RunFailedError, match=rf"gate 'mine' of environment 'sums' failed on group 'toy/0' \(task 'task-0'\): {words}"
    ) as caught:
        ask(env, rollouts_of(0.0, 1.0))
    assert component_of_error(caught.value) == "gate 'mine' of environment 'sums'"


def test_the_state_of_the_draws_is_json_and_names_what_costs_are():
    state = DrawSource([env_with()], seed=0).state_dict()
    assert json.loads(json.dumps(state)) == state and state["envs"]["sums"]["cost"] == "completion_tokens"
