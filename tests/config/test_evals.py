"""What an evaluation in training may be asked for."""

import pytest

from jaxrl.config.env import ReverseTextEnvConfig, SamplingConfig
from jaxrl.config.evals import EvalSectionConfig

WARM = SamplingConfig(temperature=0.7)


def test_an_environments_own_sampling_and_threshold_go_before_those_of_the_section() -> None:
    own = ReverseTextEnvConfig(name="own", sampling=WARM, success_threshold=0.0)
    shared = ReverseTextEnvConfig(name="shared")
    section = EvalSectionConfig(env=[own, shared], success_threshold=0.5)
    assert (section.sampling_of(own), section.success_threshold_of(own)) == (WARM, 0.0)
    assert (section.sampling_of(shared).temperature, section.success_threshold_of(shared)) == (0.0, 0.5)


def test_several_samples_at_temperature_0_are_refused_by_the_environment_that_would_play_them() -> None:
    envs = [ReverseTextEnvConfig(name="warm", sampling=WARM), ReverseTextEnvConfig(name="cold")]
    with pytest.raises(ValueError, match="`samples_per_task`=4 at temperature 0 would play the same rollout of env 'cold' again"):
        EvalSectionConfig(env=envs, samples_per_task=4)
    assert EvalSectionConfig(env=envs, samples_per_task=4, sampling=WARM).samples_per_task == 4
    assert EvalSectionConfig(env=envs[:1], samples_per_task=4).sampling.temperature == 0.0


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_are_each_played_once(seeds: list[int]) -> None:
    with pytest.raises(ValueError, match="needs at least one seed, each once"):
        EvalSectionConfig(seeds=seeds)
