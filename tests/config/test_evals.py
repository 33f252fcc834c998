"""What an evaluation in training may be asked for."""

import warnings

import pytest

from jaxrl.config.env import EnvConfig, OpenEnvConfig, QuestionsEnvConfig, ReasoningGymEnvConfig, ReverseTextEnvConfig, SamplingConfig
from jaxrl.config.evals import EvalSectionConfig
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.orchestrator import OrchestratorConfig, TrainSectionConfig

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


def warnings_of(*envs: EnvConfig) -> list[str]:
    """Return what a run warns of that is measured on some environments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        OrchestratorConfig(
            model=PolicyModelConfig(name="tiny"),
            train=TrainSectionConfig(env=[ReverseTextEnvConfig()]),
            eval=EvalSectionConfig(env=list(envs)),
        )
    return [str(warning.message) for warning in caught]


def test_an_evaluation_environment_that_leaves_its_split_to_the_default_measures_the_part_for_training_and_says_so() -> None:
    said = warnings_of(QuestionsEnvConfig(path="a.jsonl", name="mine"), ReasoningGymEnvConfig(dataset="chain_sum"))
    assert [text.partition(",")[0] for text in said] == [f"`orchestrator.eval.env.{index}.split` is not set" for index in (0, 1)]
    assert "env 'mine' measures 'train'" in said[0] and said[0].endswith("'heldout', or to 'all' for a file that is already split")
    assert said[1].endswith("set it to 'heldout', or to 'train' if that is meant")


def test_a_split_that_was_chosen_or_that_is_everything_is_no_warning() -> None:
    questions = (QuestionsEnvConfig(path="a.jsonl", name=name, split=name) for name in ("train", "heldout"))
    whole = QuestionsEnvConfig(path="a.jsonl", name="whole", heldout_frac=0.0)
    assert warnings_of(*questions, whole, ReverseTextEnvConfig(), OpenEnvConfig(base_url="http://127.0.0.1:1")) == []
