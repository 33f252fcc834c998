import pytest

from jaxrl.config.algorithm import AlgorithmSamplingConfig, CoefficientsConfig, SFTConfig
from jaxrl.types import component_members
from tests.orchestrator.algo.crediting import ERRORED, UNSCORED, credit, make_algorithm, make_rollouts

DEMONSTRATIONS = SFTConfig(sampling=AlgorithmSamplingConfig(source="demonstrations"))
WRITTEN_BY_SOMEBODY_ELSE = {"logprob": None, "version": None}

TABLE = [
    # rewards of the group, credit of each rollout
    pytest.param([1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5], id="full"),
    pytest.param([1.0, ERRORED, 0.0, UNSCORED], [0.5, None, -0.5, None], id="partial: survivors only"),
    pytest.param([1.0], [0.0], id="singleton"),
    pytest.param([0.1 + 0.2, 0.3], [0.0, 0.0], id="equal up to float noise"),
]


@pytest.mark.parametrize(("rewards", "expected"), TABLE)
@pytest.mark.parametrize("coefficients", [CoefficientsConfig(), CoefficientsConfig(rl=3.0)], ids=["plain", "rl=3"])
async def test_the_credit_is_for_those_who_look_at_it_and_every_reply_token_feeds_cross_entropy_alone(rewards, expected, coefficients):
    rollouts = make_rollouts(rewards, **WRITTEN_BY_SOMEBODY_ELSE)
    assert await credit(make_algorithm(DEMONSTRATIONS, coefficients=coefficients), rollouts) == expected
    for rollout in rollouts:
        if not rollout.is_scored:
            continue
        (sample,) = rollout.samples
        assert sample.ce_weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
        is_real = sample.token_ids >= 0
        members = component_members(sample.loss_mask, sample.rl_weights, sample.ce_weights, sample.ref_kl_weights, is_real)
        assert [int(member.sum()) for member in members] == [0, 3, 0]
