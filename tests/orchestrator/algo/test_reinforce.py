import json

import pytest

from jaxrl.config.algorithm import ReinforceConfig
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

TABLE = [
    # groups one after another, with decay 1/2: rewards, credit of each rollout, the baseline afterwards
    pytest.param([([1.0, 0.0], [1.0, 0.0], 0.25), ([1.0, 0.5], [0.75, 0.25], 0.5)], id="0, then 1/2 * 0 + 1/2 * 1/2"),
    pytest.param([([1.0], [1.0], 0.5), ([1.0], [0.5], 0.75), ([0.75], [0.0], 0.75)], id="singletons need no group"),
    pytest.param([([1.0, ERRORED, UNSCORED], [1.0, None, None], 0.5)], id="a failure is no reward of 0"),
    pytest.param([([ERRORED, UNSCORED], [None, None], 0.0)], id="no survivor: the baseline stays"),
    pytest.param([([0.6], [pytest.approx(0.6)], 0.3), ([0.1 + 0.2, 0.3], [0.0, 0.0], 0.3)], id="equal up to float noise"),
]


@pytest.mark.parametrize("groups", TABLE)
async def test_a_group_is_credited_against_the_groups_before_it(groups):
    algorithm = make_algorithm(ReinforceConfig(decay=0.5))
    for rewards, expected, baseline in groups:
        assert await credit(algorithm, make_rollouts(rewards)) == expected
        assert algorithm.state_dict() == {"baseline": pytest.approx(baseline)}


async def test_a_saved_baseline_is_json_and_goes_on_where_it_was():
    first, second = make_algorithm(ReinforceConfig()), make_algorithm(ReinforceConfig())
    await credit(first, make_rollouts([0.3, 0.7]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert await credit(first, make_rollouts([0.9])) == await credit(second, make_rollouts([0.9]))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, r"remembers its `baseline`, but the state to restore has \[\]"),
        ({"baselines": {}}, r"has \['baselines'\]"),
        ({"baseline": 0.5, "step": 3}, r"has \['baseline', 'step'\]"),
        ({"baseline": None}, "`baseline` must be a finite number, got None"),
        ({"baseline": "0.5"}, "got '0.5'"),
        ({"baseline": True}, "got True"),
        ({"baseline": float("nan")}, "got nan"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, problem):
    algorithm = make_algorithm(ReinforceConfig())
    with pytest.raises(ValueError, match=problem):
        algorithm.load_state_dict(state)
    assert algorithm.state_dict() == {"baseline": 0.0}
