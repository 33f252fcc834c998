import pytest

from jaxrl.config.algorithm import RLOOConfig
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

TABLE = [
    # rewards of the group, credit of each rollout
    pytest.param([1.0, 0.0, 0.5], [0.75, -0.75, 0.0], id="means of the others: 1/4, 3/4, 1/2"),
    pytest.param([1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3], id="one in four"),
    pytest.param([1.0, 0.0], [1.0, -1.0], id="a pair: each is the other's baseline"),
    pytest.param([1.0, ERRORED, 0.0, UNSCORED], [1.0, None, -1.0, None], id="partial: survivors only"),
    pytest.param([1.0, ERRORED], [0.0, None], id="one survivor: no division by 0"),
    pytest.param([0.7], [0.0], id="singleton"),
    pytest.param([0.7, 0.7, 0.7], [0.0, 0.0, 0.0], id="all equal"),
    pytest.param([0.1 + 0.2, 0.3, 0.3], [0.0, 0.0, 0.0], id="equal up to float noise"),
]


@pytest.mark.parametrize(("rewards", "expected"), TABLE)
async def test_credit_is_the_reward_minus_the_mean_of_the_others(rewards, expected):
    assert await credit(make_algorithm(RLOOConfig()), make_rollouts(rewards)) == pytest.approx(expected)
