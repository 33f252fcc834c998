from typing import ClassVar

import numpy as np
import pytest

from jaxrl.config import algorithm as algorithm_configs
from jaxrl.config.algorithm import AlgorithmBase, GRPOConfig
from jaxrl.errors import SampleError
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES, GRPO, Algorithm, build_algorithm
from jaxrl.types import Boundary, Rollout
from tests.builders import make_group, make_rollout
from tests.fakes import ScriptedPool
from tests.orchestrator.algo.crediting import credit, make_rollouts


def _grpo() -> Algorithm:
    return build_algorithm(GRPOConfig(), ScriptedPool())


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


async def test_an_algorithm_that_forgets_to_give_credit_fails_those_rollouts_alone():
    class Forgetful(GRPO):
        async def score_group(self, rollouts):
            rollouts[0].assign_advantages(0.0)

    rollouts = make_rollouts([1.0, 0.0, 0.5])
    assert await credit(Forgetful(GRPOConfig(), ScriptedPool()), rollouts) == [0.0, None, None]
    assert rollouts[0].failure is None
    assert {(r.failure.boundary, r.failure.type, r.reward) for r in rollouts[1:]} == {(Boundary.ALGORITHM, "SampleError", None)}
    assert rollouts[1].failure.message.startswith("env 'toy': it has live rl tokens but no `advantages`")


async def test_a_stream_that_is_no_array_fails_its_rollout_alone():
    class Listing(GRPO):
        async def score_group(self, rollouts):
            await super().score_group(rollouts)
            rollouts[0].samples[0].ce_weights = [0.0] * 5

    rollouts = make_rollouts([1.0, 0.0])
    await credit(Listing(GRPOConfig(), ScriptedPool()), rollouts)
    assert "must be [5] float32, got a list" in rollouts[0].failure.message
    assert rollouts[1].failure is None and rollouts[1].is_frozen


async def test_an_algorithm_of_the_rl_loss_may_write_cross_entropy_weights_on_what_nobody_sampled():
    class Echoing(GRPO):
        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                sample.ce_weights = np.where(sample.loss_mask, 0, np.float32(0.1)) * (np.arange(len(sample)) > 0).astype(np.float32)

    rollouts = make_rollouts([1.0, 0.0])
    assert await credit(Echoing(GRPOConfig(), ScriptedPool()), rollouts) == [0.5, -0.5]
    sample = rollouts[0].samples[0]
    np.testing.assert_array_equal(sample.ce_weights, np.array([0, 0.1, 0, 0, 0], np.float32))
    assert (sample.rl_weights, sample.ref_kl_weights) == (None, None)


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
    assert "tokens that the policy did not sample" in group.rollouts[0].failure.message


def test_the_drivers_cannot_be_overridden():
    with pytest.raises(TypeError, match="overrides a driver"):

        class Wrong(Algorithm):
            async def finalize_group(self, rollouts):
                pass


CONFIG_CLASSES = {
    cls.model_fields["type"].default: cls
    for cls in vars(algorithm_configs).values()
    if isinstance(cls, type) and issubclass(cls, AlgorithmBase) and not cls.model_fields["type"].is_required()
}


def test_every_config_has_a_class_and_every_class_a_config():
    assert set(ALGORITHM_CLASSES) == set(CONFIG_CLASSES)


@pytest.mark.parametrize("name", sorted(ALGORITHM_CLASSES))
def test_a_class_and_its_config_name_the_same_loss(name):
    assert ALGORITHM_CLASSES[name].action_loss_type == CONFIG_CLASSES[name].action_loss_type


def test_environments_never_share_an_instance():
    pool = ScriptedPool()
    algorithm = build_algorithm(GRPOConfig(), pool)
    assert type(algorithm) is ALGORITHM_CLASSES["grpo"] is GRPO
    assert build_algorithm(GRPOConfig(), pool) is not algorithm


def test_an_algorithm_without_memory_refuses_a_state_that_is_not_empty():
    algorithm = _grpo()
    algorithm.load_state_dict(algorithm.state_dict())
    with pytest.raises(ValueError, match="remembers nothing"):
        algorithm.load_state_dict({"baseline": 1.0})
