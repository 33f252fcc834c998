from typing import ClassVar

import numpy as np
import pytest

from jaxrl.config.algorithm import GRPOConfig
from jaxrl.errors import SampleError
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES, GRPO, Algorithm, build_algorithm
from jaxrl.types import Boundary, Failure, Rollout
from tests.builders import make_group, make_rollout
from tests.fakes import ScriptedPool

FAILURE = Failure(Boundary.ENV, "ValueError", "broke")


def _grpo() -> Algorithm:
    return build_algorithm(GRPOConfig(), ScriptedPool())


@pytest.mark.parametrize(
    ("rewards", "failed", "expected"),
    [
        pytest.param([1.0, 0.0, 0.0, 1.0], [], [0.5, -0.5, -0.5, 0.5], id="full"),
        pytest.param([1.0, None, 0.0, None], [1, 3], [0.5, None, -0.5, None], id="partial: survivors only"),
        pytest.param([1.0, None, 0.0], [], [0.5, None, -0.5], id="unscored is not zero"),
        pytest.param([1.0, 0.0, 0.0], [0], [None, 0.0, 0.0], id="an errored member is no baseline"),
        pytest.param([0.25], [], [0.0], id="singleton"),
        pytest.param([1.0, None], [1], [0.0, None], id="one survivor"),
        pytest.param([0.7, 0.7, 0.7], [], [0.0, 0.0, 0.0], id="all equal"),
        pytest.param([0.1 + 0.2, 0.3], [], [0.0, 0.0], id="float-noise equal"),
        pytest.param([None, None], [0, 1], [None, None], id="all failed"),
    ],
)
async def test_group_algebra(rewards, failed, expected):
    group = make_group(rewards)
    for index in failed:
        group.rollouts[index].reward, group.rollouts[index].failure = None, FAILURE
    await _grpo().finalize_group(group.survivors)
    assert [r.mean_advantage() for r in group] == expected


async def test_plain_group_credit_ships_one_stream_and_is_frozen():
    group = make_group([1.0, 0.0])
    await _grpo().finalize_group(group.survivors)
    sample = group.rollouts[0].samples[0]
    assert sample.advantages.tolist() == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert (sample.rl_weights, sample.ce_weights, sample.ref_kl_weights, sample.ref_logprobs) == (None,) * 4
    with pytest.raises(SampleError, match="frozen"):
        group.rollouts[0].assign_advantages(1.0)
    with pytest.raises(ValueError, match="read-only"):
        sample.advantages[2] = 9.0


async def test_the_arrival_hook_is_not_called_for_a_rollout_without_samples():
    seen: list[int] = []

    class Watching(Algorithm):
        async def score_rollout(self, rollout: Rollout) -> None:
            seen.append(rollout.member)

    algorithm = Watching(GRPOConfig(), ScriptedPool())
    await algorithm.finalize_rollout(make_rollout(member=0, with_samples=False))
    await algorithm.finalize_rollout(make_rollout(member=1))
    assert seen == [1]


async def test_a_group_without_survivors_is_not_scored():
    class Strict(Algorithm):
        async def score_group(self, rollouts):
            raise AssertionError("scored an empty group")

    await Strict(GRPOConfig(), ScriptedPool()).finalize_group([])


async def test_a_weight_on_a_first_token_fails_that_rollout_alone():
    class Careless(GRPO):
        async def score_group(self, rollouts):
            await super().score_group(rollouts)
            rollouts[1].samples[0].ce_weights = np.full(len(rollouts[1].samples[0]), 0.1, np.float32)

    group = make_group([1.0, 0.0, 0.5])
    await Careless(GRPOConfig(), ScriptedPool()).finalize_group(group.survivors)
    failure = group.rollouts[1].failure
    assert failure.boundary is Boundary.ALGORITHM and failure.type == "SampleError" and "first token" in failure.message
    assert group.rollouts[1].reward is None
    assert [r.member for r in group.survivors] == [0, 2]
    assert [r.mean_advantage() for r in group.survivors] == [0.5, 0.0]


async def test_a_distillation_of_frozen_tokens_is_stamped_as_cross_entropy():
    class Distil(Algorithm):
        action_loss_type: ClassVar = "ce"

    group = make_group([1.0], logprob=None, version=None)
    await Distil(GRPOConfig(), ScriptedPool()).finalize_group(group.survivors)
    assert group.rollouts[0].samples[0].ce_weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert group.rollouts[0].samples[0].advantages is None


async def test_rl_credit_on_frozen_tokens_fails_the_rollout():
    group = make_group([1.0, 0.0], logprob=None, version=None)
    await _grpo().finalize_group(group.survivors)
    assert group.survivors == []
    assert "frozen source" in group.rollouts[0].failure.message


def test_the_drivers_cannot_be_overridden():
    with pytest.raises(TypeError, match="overrides a driver"):

        class Wrong(Algorithm):
            async def finalize_group(self, rollouts):
                pass


def test_every_class_is_registered_under_the_type_of_its_config():
    algorithm = build_algorithm(GRPOConfig(), ScriptedPool())
    assert type(algorithm) is ALGORITHM_CLASSES["grpo"] is GRPO
    assert algorithm.action_loss_type == "rl"


def test_an_algorithm_without_memory_refuses_a_state_that_is_not_empty():
    algorithm = _grpo()
    algorithm.load_state_dict(algorithm.state_dict())
    with pytest.raises(ValueError, match="remembers nothing"):
        algorithm.load_state_dict({"baseline": 1.0})
