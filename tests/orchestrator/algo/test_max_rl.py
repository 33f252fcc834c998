import pytest

from jaxrl.config.algorithm import MaxRLConfig
from jaxrl.types import Boundary
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

TABLE = [
    # rewards of the group, credit of each rollout
    pytest.param([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0], id="one in four: mean 1/4"),
    pytest.param([1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0], id="three in four"),
    pytest.param([0.5, 0.25, 0.0], [1.0, 0.0, -1.0], id="graded: mean 1/4"),
    pytest.param([1.0, ERRORED, 0.0, 0.0, UNSCORED], [2.0, None, -1.0, -1.0, None], id="partial: mean of the survivors 1/3"),
    pytest.param([ERRORED, 1.0], [None, 0.0], id="one survivor"),
    pytest.param([0.7], [0.0], id="singleton"),
    pytest.param([1.0, 1.0], [0.0, 0.0], id="all right"),
    pytest.param([0.0, 0.0], [0.0, 0.0], id="all wrong: no division by 0"),
    pytest.param([0.1 + 0.2, 0.3], [0.0, 0.0], id="equal up to float noise"),
    pytest.param([0.3 - 0.2 - 0.1, 0.0], [0.0, 0.0], id="0 up to float noise"),
    pytest.param([-1.0, 0.5], [0.0, 0.0], id="a mean below 0"),
]


@pytest.mark.parametrize(("rewards", "expected"), TABLE)
async def test_credit_is_relative_to_the_mean_of_the_survivors(rewards, expected):
    assert await credit(make_algorithm(MaxRLConfig()), make_rollouts(rewards)) == pytest.approx(expected)


async def test_a_negative_reward_beside_a_positive_mean_fails_its_group_and_says_what_to_do():
    rollouts = make_rollouts([-1.0, 1.001])
    assert await credit(make_algorithm(MaxRLConfig()), rollouts) == [None, None]
    assert {r.failure.boundary for r in rollouts} == {Boundary.ALGORITHM}
    assert "must not be negative" in rollouts[0].failure.message and "'grpo' or 'rloo'" in rollouts[0].failure.message
