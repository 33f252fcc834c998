"""Credit by turn: which token takes which turn's credit, over branches too, and what becomes of a rollout without turn rewards."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.algorithm import EchoConfig, GRPOConfig
from jaxrl.orchestrator.algo.group_credit import spread_turns
from jaxrl.types import Boundary
from tests.builders import make_node, make_rollout
from tests.orchestrator.algo.crediting import credit, make_algorithm
from tests.orchestrator.wiring import renderer

TWO_TURNS = [([1, 2], [3, 4]), ([5], [6])]


def played(turn_rewards, member=0, turns=TWO_TURNS):
    rollout = make_rollout(sum(turn_rewards or [1.0]), member=member, turns=turns)
    rollout.turn_rewards = turn_rewards
    return rollout


@pytest.mark.parametrize("config", [GRPOConfig(credit="turn"), EchoConfig(credit="turn")], ids=lambda config: config.type)
async def test_each_token_takes_the_credit_of_its_turn(config):
    rollouts = [played([0.0, 1.0], member=0), played([1.0], member=1, turns=[([1, 2], [3, 4])])]
    algorithm = make_algorithm(config, renderer=renderer())
    await algorithm.finalize_group(rollouts)
    # The mean of 0, 1 and 1 is 2/3: 1/3 and -1/3 for the turns of the first, 1/3 for the one of the second.
    expected = [[0, 0, -1 / 3, -1 / 3, 0, 1 / 3], [0, 0, 1 / 3, 1 / 3]]
    for rollout, advantages in zip(rollouts, expected, strict=True):
        assert rollout.failure is None
        np.testing.assert_allclose(rollout.samples[0].advantages, advantages, rtol=1e-6)


async def test_equal_turn_rewards_give_assigned_zeros():
    rollouts = [played([0.5, 0.5]), played([0.5], member=1, turns=[([1, 2], [3, 4])])]
    assert await credit(make_algorithm(GRPOConfig(credit="turn")), rollouts) == [0.0, 0.0]


async def test_the_reward_of_the_whole_rollout_is_not_looked_at():
    rollouts = [played([0.5]), played([0.5], member=1)]
    for rollout, reward in zip(rollouts, (0.0, 1.0), strict=True):
        rollout.nodes, rollout.reward = rollout.nodes[:2], reward
    assert await credit(make_algorithm(GRPOConfig(credit="turn")), rollouts) == [0.0, 0.0]


@pytest.mark.parametrize(("turn_rewards", "got"), [(None, "no rewards of turns"), ([1.0], "1 rewards of turns")])
async def test_a_rollout_without_a_reward_for_each_turn_fails_alone_and_is_in_no_mean(turn_rewards, got):
    rollouts = [played([1.0, 1.0]), played(turn_rewards, member=1), played([0.0, 0.0], member=2)]
    await credit_all(rollouts)
    failure = rollouts[1].failure
    assert (failure.boundary, failure.type, rollouts[1].reward) == (Boundary.ALGORITHM, "SampleError", None)
    assert failure.message == (
        f"env 'toy', task 'task-0': `credit`='turn' needs a reward for each of its 2 policy turns, and the environment gave {got} "
        "(`Outcome.turn_rewards`); let it give them, or use `credit`='rollout'"
    )
    assert [rollout.samples[0].advantages.tolist() for rollout in (rollouts[0], rollouts[2])] == [
        [0, 0, 1.0, 1.0, 0, 0.5], [0, 0, -1.0, -1.0, 0, -0.5]
    ]  # fmt: skip


async def credit_all(rollouts):
    await make_algorithm(GRPOConfig(credit="turn")).finalize_group(rollouts)


def test_a_turn_that_branches_share_has_its_credit_once_and_an_empty_turn_is_a_turn():
    rollout = make_rollout(turns=[])
    empty = make_node(1, [40], role="assistant")
    empty.sampled = True  # nothing but its generation prompt
    rollout.nodes = [
        *[make_node(None, [1]), make_node(0, [2, 3], num_sampled=1), empty, make_node(2, [4]), make_node(3, [5], num_sampled=1)],
        *[make_node(1, [6]), make_node(5, [7], num_sampled=1)],
    ]
    rollout.samples = rollout_to_samples(rollout)
    assert [sample.token_ids.tolist() for sample in rollout.samples] == [[1, 2, 3, 40, 4, 5], [1, 2, 3, 6, 7]]
    spread = spread_turns(rollout, np.array([10.0, 20.0, 30.0, 40.0]))
    assert spread.dtype == np.float32
    assert spread.tolist() == [*[0, 0, 10, 0, 0, 30], *[0, 0, 0, 0, 40]]
    rollout.assign_advantages(spread)
    assert [sample.advantages.tolist() for sample in rollout.samples] == [[0, 0, 10, 0, 0, 30], [0, 0, 0, 0, 40]]
