"""The start model of the curriculum's demonstration learns from right answers to questions that are not held out, and is made once."""

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxrl.config.env import ReasoningGymEnvConfig
from jaxrl.config.load import load_config
from jaxrl.envs.build import build_environment
from jaxrl.types import TrainingSample

_spec = importlib.util.spec_from_file_location("prepare_curriculum", Path(__file__).parents[1] / "configs" / "curriculum" / "prepare.py")
assert _spec is not None and _spec.loader is not None
prepare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prepare)

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "QUESTIONS_PER_TIER", 150)


def test_every_document_is_right_and_of_no_held_out_question() -> None:
    maker, shares = prepare.load_maker(), {"3": 1.0, "8": 0.0}
    (env,) = load_config(prepare.CONFIG).orchestrator.eval.env
    assert isinstance(env, ReasoningGymEnvConfig)
    assert set(prepare.SETTINGS["worked_shares"]) == {str(tier.parameters["max_terms"]) for tier in env.tiers}
    heldout = {spec["question"] for spec in build_environment(env.model_copy(update={"num_tasks": 50})).tasks()}
    for skill_share in (0.0, 1.0):
        for document in itertools.islice(prepare.documents(maker, random.Random(1), skill_share, shares), 20):
            text, (trained,) = "".join(span for span, _ in document), [span for span, is_trained in document if is_trained]
            question, reply = text.removesuffix("<|im_end|>\n").split("<|im_start|>user\n")[1].split("<|im_end|>\n<|im_start|>assistant\n")
            expression = maker.expression_of(question)
            assert question not in heldout and eval(expression) == int(reply.rpartition("</think>")[2])
            is_worked = skill_share == 1 or len(expression.split()) == 5
            assert reply.startswith("<think>") == is_worked
            if is_worked:
                assert all(
                    eval(left) == int(right) for left, right in (line.split("=") for line in reply[7:].split("</think>")[0].split("\n"))
                )
            assert trained == f"{reply}<|im_end|>".removeprefix("<think>" if skill_share == 1 else ""), (
                "the skill, and not whether to use it"
            )


def test_the_start_model_is_made_and_measured_once_with_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, fits = prepare.load_maker(), []

    def fit(model: Any, params: dict, samples: Iterator[TrainingSample], *settings: Any, rows: int) -> dict:
        fits.append((next(samples), settings[:2]))
        return params

    maker.fit = fit
    monkeypatch.setattr(prepare, "load_maker", lambda: maker)
    monkeypatch.setattr(prepare, "measure", lambda folder: {"3_terms": {"greedy": 0.5}})
    out = tmp_path / "start"
    for _ in range(2):
        prepare.make_start(out, QUIET)
    ((sample, settings),) = fits
    assert settings == (prepare.SETTINGS["steps"], prepare.SETTINGS["lr"]) and sample.ce_weights.any()
    assert json.loads((out / "measured.json").read_text()) == {"settings": prepare.SETTINGS, "tiers": {"3_terms": {"greedy": 0.5}}}
    monkeypatch.setattr(prepare, "SETTINGS", {**prepare.SETTINGS, "steps": 1})
    prepare.make_start(out, QUIET)
    assert len(fits) == 2 and json.loads((out / "measured.json").read_text())["settings"]["steps"] == 1
