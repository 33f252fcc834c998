import json

import pytest

from jaxrl.config.algorithm import RAEConfig
from jaxrl.types import Boundary
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

TABLE = [
    # one group, with decay 0.95: the agent of each rollout, rewards, credit of each rollout, the baselines afterwards
    pytest.param([None, None], [1.0, 1.0], [1.0, 0.95], {"policy": 0.0975}, id="0.05 after the first, 0.0975 after the second"),
    pytest.param(["x", "o", "x", "o"], [1.0, -1.0, 1.0, 0.0], [1.0, -1.0, 0.95, 0.05], {"x": 0.0975, "o": -0.0475}, id="one per agent"),
    pytest.param(["x", "x", "x"], [1.0, ERRORED, UNSCORED], [1.0, None, None], {"x": 0.05}, id="a failure is no reward of 0"),
    pytest.param(["x"], [0.0], [0.0], {"x": 0.0}, id="singleton"),
    pytest.param(["x", "o"], [ERRORED, UNSCORED], [None, None], {}, id="no survivor"),
]


def played_by(agents, rollouts):
    for rollout, agent in zip(rollouts, agents, strict=True):
        if agent is not None:
            rollout.info["agent"] = agent
    return rollouts


@pytest.mark.parametrize(("agents", "rewards", "expected", "baselines"), TABLE)
async def test_a_rollout_is_credited_against_what_its_agent_got_before(agents, rewards, expected, baselines):
    algorithm = make_algorithm(RAEConfig())
    assert await credit(algorithm, played_by(agents, make_rollouts(rewards))) == pytest.approx(expected)
    assert algorithm.state_dict() == {"baselines": pytest.approx(baselines)}


async def test_a_reward_that_equals_the_baseline_up_to_float_noise_gets_exactly_0():
    algorithm = make_algorithm(RAEConfig())
    algorithm.load_state_dict({"baselines": {"policy": 0.3}})
    assert await credit(algorithm, make_rollouts([0.1 + 0.2])) == [0.0]


@pytest.mark.parametrize("agent", [3, "", ["x"]])
async def test_an_agent_without_a_name_fails_the_group_and_leaves_the_baselines(agent):
    algorithm = make_algorithm(RAEConfig())
    rollouts = played_by(["x", agent], make_rollouts([1.0, 1.0]))
    assert await credit(algorithm, rollouts) == [None, None]
    assert {(r.failure.boundary, r.failure.type) for r in rollouts} == {(Boundary.ALGORITHM, "EnvError")}
    assert f"must be the name of the agent that played, got {agent!r}" in rollouts[0].failure.message
    assert algorithm.state_dict() == {"baselines": {}}


async def test_a_reward_that_is_no_credit_fails_the_group_and_leaves_the_baselines():
    algorithm = make_algorithm(RAEConfig())
    assert await credit(algorithm, played_by(["x", "o"], make_rollouts([1.0, 1e38]))) == [None, None]
    assert algorithm.state_dict() == {"baselines": {}}


async def test_saved_baselines_are_json_and_go_on_where_they_were():
    first, second = make_algorithm(RAEConfig()), make_algorithm(RAEConfig())
    await credit(first, played_by(["x", "o"], make_rollouts([0.3, 0.7])))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert await credit(first, make_rollouts([0.9])) == await credit(second, make_rollouts([0.9]))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "remembers `baselines` by agent, but the state to restore is {}"),
        ({"baseline": 0.0}, "the state to restore is {'baseline': 0.0}"),
        ({"baselines": [0.5]}, r"the state to restore is {'baselines': \[0.5\]}"),
        ({"baselines": {"x": 0.5, "o": None}}, "`baselines.o` must be a finite number, got None"),
        ({"baselines": {"x": float("inf")}}, "`baselines.x` must be a finite number, got inf"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, problem):
    algorithm = make_algorithm(RAEConfig())
    with pytest.raises(ValueError, match=problem):
        algorithm.load_state_dict(state)
    assert algorithm.state_dict() == {"baselines": {}}
