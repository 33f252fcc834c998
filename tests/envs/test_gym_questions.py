"""What environments of `reasoning_gym` share: the questions, what comes before them, and what a reply is worth."""

import contextlib
import logging

import pytest

from jaxrl.config.env import ExampleConfig, FeedbackEnvConfig, ReasoningGymEnvConfig, ToolsEnvConfig
from jaxrl.envs.gym_questions import gym_questions
from jaxrl.errors import ConfigError

SUMS = {"dataset": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "num_tasks": 30}


def test_every_environment_of_a_dataset_asks_the_same_questions() -> None:
    asked = [gym_questions(config(**SUMS)).specs for config in (ReasoningGymEnvConfig, ToolsEnvConfig, FeedbackEnvConfig)]
    assert asked[0] == asked[1] == asked[2] and len(asked[0]) > 20


def test_a_system_message_and_examples_come_before_the_question_and_are_not_asked() -> None:
    first, second, *_ = gym_questions(ToolsEnvConfig(**SUMS)).specs
    example = ExampleConfig(question=first["question"], answer=first["answer"])
    questions = gym_questions(ToolsEnvConfig(**SUMS, system_prompt="Be short.", examples=[example]))
    assert questions.opening == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": first["question"]},
        {"role": "assistant", "content": first["answer"]},
    ]
    assert questions.specs[0] == second and first not in questions.specs


def test_examples_that_leave_no_task_are_refused() -> None:
    [only] = gym_questions(ToolsEnvConfig(**SUMS | {"num_tasks": 1, "split": "all"})).specs
    example = ExampleConfig(question=only["question"], answer=only["answer"])
    with pytest.raises(ConfigError, match="each of its 1 tasks is one of `examples`"):
        gym_questions(ToolsEnvConfig(**SUMS | {"num_tasks": 1, "split": "all"}, examples=[example]))


async def test_the_datasets_scorer_works_for_any_of_them() -> None:
    questions = gym_questions(FeedbackEnvConfig.model_validate(SUMS | {"scorer": "dataset"}))
    spec = questions.specs[0]
    with contextlib.closing(questions):
        worth = [await questions.score(spec, text) for text in (spec["answer"], f"<think>?</think>{spec['answer']}", "none")]  # pyright: ignore[reportGeneralTypeIssues]
    assert worth == [1.0, 1.0, 0.0] and not questions.require_stop


def test_an_item_is_kept_for_every_question() -> None:
    questions = gym_questions(ToolsEnvConfig(**SUMS))
    assert all(questions.items[spec["id"]]["metadata"]["expression"] in spec["question"] for spec in questions.specs)


def test_what_is_left_of_the_items_that_were_asked_for_is_said_and_a_small_rest_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxrl.envs.gym_questions")
    sums = SUMS | {"num_tasks": 100, "name": "x"}
    train, heldout = (len(gym_questions(ReasoningGymEnvConfig(**sums, split=split)).specs) for split in ("train", "heldout"))
    distinct = train + heldout
    assert distinct < 100 and heldout < 30
    items = f"out of 100 items (`num_tasks`=100), of which {100 - distinct} ask what another one asks"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"env 'x': {train} of {distinct} questions (split 'train'; `heldout_frac`=0.1 keeps {heldout} for 'heldout'), {items}"),
        (
            "WARNING",
            f"env 'x': {heldout} of {distinct} questions (split 'heldout'; `heldout_frac`=0.1 keeps {train} for 'train'), {items}"
            "; raise `num_tasks` for more",
        ),
    ]
