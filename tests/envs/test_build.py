"""From config to environment, and the wall between training and held-out questions."""

import pytest

from jaxrl.config.env import ReasoningGymEnvConfig, ReverseTextEnvConfig
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.errors import ConfigError
from tests.fakes import ToyEnv


def sums(**options) -> ReasoningGymEnvConfig:  # type: ignore[no-untyped-def]
    return ReasoningGymEnvConfig(**({"dataset": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "num_tasks": 100} | options))


def test_an_environment_is_named_by_its_config_or_its_dataset_or_its_type() -> None:
    assert build_environment(sums(num_tasks=5)).name == "chain_sum"
    assert build_environment(sums(num_tasks=5, name="sums")).name == "sums"
    assert build_environment(ReverseTextEnvConfig(num_tasks=5)).name == "reverse_text"


def test_train_and_heldout_of_one_dataset_pass_and_a_shared_question_does_not() -> None:
    train, heldout = build_environment(sums(heldout_frac=0.2)), build_environment(sums(split="heldout", heldout_frac=0.2, seed=3))
    require_disjoint_questions([train], [heldout])
    widened = build_environment(sums(split="heldout", heldout_frac=0.5, name="wide"))
    with pytest.raises(ConfigError, match=r"question\(s\) of evaluation env 'wide' are also trained on by env 'chain_sum'"):
        require_disjoint_questions([train], [heldout, widened])


def test_shared_tasks_without_a_question_text_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    texts = build_environment(ReverseTextEnvConfig(num_tasks=5))
    require_disjoint_questions([texts], [texts])
    assert "5 task(s) of evaluation env 'reverse_text' are also trained on" in caplog.text
    odd = SingleTurnEnvironment(
        "odd", [{"id": "a", "question": ["x"]}, {"id": "b", "question": None}], prompt=str, score=lambda spec, text: 0.0
    )
    require_disjoint_questions([odd], [odd])
    assert "2 task(s) of evaluation env 'odd' are also trained on" in caplog.text, "a question that is no text is part of its task"
    with pytest.raises(ConfigError, match="'q0'"):
        require_disjoint_questions([texts, ToyEnv("a")], [ToyEnv("b")])
