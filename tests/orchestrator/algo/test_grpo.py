import pytest

from jaxrl.config.algorithm import GRPOConfig, TokensPenaltyConfig, TurnsPenaltyConfig
from tests.builders import make_node
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

TABLE = [
    # rewards of the group, credit of each rollout
    pytest.param([1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5], id="full"),
    pytest.param([1.0, 0.5, 0.75, 0.75], [0.25, -0.25, 0.0, 0.0], id="graded"),
    pytest.param([-2.0, 2.0], [-2.0, 2.0], id="negative rewards"),
    pytest.param([1.0, ERRORED, 0.0, ERRORED], [0.5, None, -0.5, None], id="partial: survivors only"),
    pytest.param([1.0, UNSCORED, 0.0], [0.5, None, -0.5], id="unscored is not 0"),
    pytest.param([ERRORED, 1.0, UNSCORED], [None, 0.0, None], id="one survivor"),
    pytest.param([0.7], [0.0], id="singleton"),
    pytest.param([0.7, 0.7, 0.7], [0.0, 0.0, 0.0], id="all equal"),
    pytest.param([0.1 + 0.2, 0.3], [0.0, 0.0], id="equal up to float noise"),
    pytest.param([ERRORED, UNSCORED], [None, None], id="no survivor"),
]


@pytest.mark.parametrize(("rewards", "expected"), TABLE)
async def test_credit_is_the_reward_minus_the_mean_of_the_survivors(rewards, expected):
    assert await credit(make_algorithm(GRPOConfig()), make_rollouts(rewards)) == expected


PENALISED = [
    # rewards, completion tokens of each rollout, credit of each
    pytest.param([1.0, 1.0, 0.0], [2, 6, 1], [2 / 3, 1 / 6, -5 / 6], id="mean cost 4: shaped 1.5, 1, 0"),
    pytest.param([1.0, 1.0], [2, 6], [0.25, -0.25], id="all right: the cheaper one is better"),
    pytest.param([1.0, 1.0, 0.0], [4, 4, 4], [1 / 3, 1 / 3, -2 / 3], id="equal costs: plain"),
    pytest.param([0.0, 0.0, 0.0], [2, 6, 4], [0.0, 0.0, 0.0], id="nobody earned anything"),
    pytest.param([1.0, ERRORED, 1.0, 0.0], [2, 1, 6, 1], [2 / 3, None, 1 / 6, -5 / 6], id="an errored one has no cost either"),
    pytest.param([0.5], [3], [0.0], id="singleton"),
]


@pytest.mark.parametrize(("rewards", "num_tokens", "expected"), PENALISED)
async def test_with_a_penalty_on_tokens_the_cheaper_of_the_best_count_more(rewards, num_tokens, expected):
    algorithm = make_algorithm(GRPOConfig(length_penalty=TokensPenaltyConfig()))
    assert await credit(algorithm, make_rollouts(rewards, num_tokens)) == pytest.approx(expected)


def with_tool_answer(rollouts, member: int, num_tokens: int):
    """Let a tool answer before the reply of one rollout, in two branches that share the answer."""
    nodes = rollouts[member].nodes
    reply = nodes.pop()
    nodes.append(make_node(0, range(20, 20 + num_tokens), role="tool"))
    reply.parent = 1
    nodes += [reply, make_node(1, [40], role="user")]
    return rollouts


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        pytest.param(TokensPenaltyConfig(), [1.5, 1.0], id="costs 4 + 0 and 4 + 8: mean 8"),
        pytest.param(TokensPenaltyConfig(tool_response_weight=0.5), [4 / 3, 1.0], id="costs 4 and 4 + 4: mean 6"),
        pytest.param(TokensPenaltyConfig(completion_weight=0.0), [2.0, 1.0], id="costs 0 and 8: the free one counts twice"),
        pytest.param(TokensPenaltyConfig(tool_response_weight=0.0), [1.0, 1.0], id="equal costs"),
        pytest.param(TokensPenaltyConfig(completion_weight=0.0, tool_response_weight=0.0), [1.0, 1.0], id="no costs"),
        pytest.param(TurnsPenaltyConfig(), [1.0, 1.0], id="one turn each"),
    ],
)
async def test_tokens_of_the_policy_and_of_tools_are_weighed_and_those_of_a_shared_node_count_once(penalty, expected):
    rollouts = with_tool_answer(make_rollouts([1.0, 1.0], [4, 4]), member=1, num_tokens=8)
    mean = sum(expected) / 2
    assert await credit(make_algorithm(GRPOConfig(length_penalty=penalty)), rollouts) == pytest.approx([s - mean for s in expected])


async def test_an_answer_of_a_tool_that_a_rewritten_history_tells_again_costs_once():
    rollouts = with_tool_answer(make_rollouts([1.0, 1.0], [4, 4]), member=1, num_tokens=8)
    retold = make_node(0, [50] * 8, role="tool")
    retold.is_retold = True
    rollouts[1].nodes.append(retold)
    algorithm = make_algorithm(GRPOConfig(length_penalty=TokensPenaltyConfig()))
    assert await credit(algorithm, rollouts) == [0.25, -0.25]  # costs 4 and 4 + 8, mean 8: shaped 1.5 and 1


async def test_with_a_penalty_on_turns_fewer_turns_are_cheaper():
    one, three = [([1, 2], [3])], [([1, 2], [3]), ([4], [5]), ([6], [7])]
    rollouts = [*make_rollouts([1.0], turns=one), *make_rollouts([1.0], turns=three)]
    rollouts[1].member = 1
    algorithm = make_algorithm(GRPOConfig(length_penalty=TurnsPenaltyConfig()))
    assert await credit(algorithm, rollouts) == [0.25, -0.25]  # costs 1 and 3, mean 2: shaped 1.5 and 1
