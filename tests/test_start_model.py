"""The quickstart's starting model: small enough to ship, and made of documents with no wrong answer under the loss."""

import hashlib
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from jaxrl.config.algorithm import DEFAULT_HINT
from jaxrl.config.env import ReasoningGymEnvConfig
from jaxrl.envs.build import build_environment
from jaxrl.inference.rendering import Renderer

FOLDER = Path(__file__).parents[1] / "configs" / "quickstart"
_spec = importlib.util.spec_from_file_location("make_start_model", FOLDER / "make_start_model.py")
maker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(maker)


@pytest.fixture(scope="module")
def documents() -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return (right answer, document) of some hundred questions."""
    parameters = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    env = build_environment(ReasoningGymEnvConfig(dataset="chain_sum", parameters=parameters, num_tasks=400))
    rng = random.Random(0)
    return [(spec["answer"], maker.document(spec["question"], spec["answer"], rng, 0.5)) for spec in env.tasks()]


def value_of(expression: str) -> int:
    """Return the value of a chain of sums and differences."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression.replace(" ", "")))


def test_every_trained_span_is_right(documents) -> None:
    num_worked = num_calls = 0
    for answer, document in documents:
        for span in (text.removesuffix("<|im_end|>") for text, is_trained in document if is_trained):
            if span.startswith("<tool_call>"):
                call = json.loads(span.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                assert value_of(call["arguments"]["expr"]) == int(answer)
                num_calls += 1
            elif span.startswith("<think>"):
                lines, said = span.removeprefix("<think>").split("</think>")
                assert said == answer
                assert all(value_of(left) == int(right) for left, right in (line.split("=") for line in lines.split("\n")))
                num_worked += 1
            else:
                assert span == answer
    assert num_worked > 100 and num_calls > 10


def test_the_mix_has_a_second_user_turn_after_a_wrong_answer_and_a_tools_reply_and_trains_no_header(documents) -> None:
    retries = 0
    for answer, document in documents:
        assert document[0] == (document[0][0], False) and document[-1] == ("\n", False)
        assert not any(is_trained for text, is_trained in document if text.startswith("<|im_start|>"))
        wrong = [text for text, _ in document if re.fullmatch(r"-?\d+<\|im_end\|>", text) and text != f"{answer}<|im_end|>"]
        retries += len(wrong)
        assert all((text, False) in document for text in wrong)
    assert retries > 10


def test_what_ships_is_at_most_4_mb_and_renders_every_special_token_as_one(documents) -> None:
    files = list((FOLDER / "start_model").iterdir())
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    renderer = Renderer.from_pretrained(FOLDER / "start_model")
    for special in maker.SPECIALS:
        assert len(renderer._tokenizer.encode(special, add_special_tokens=False)) == 1
    measured = json.loads((FOLDER / "start_model" / "measured.json").read_text())["heldout"]
    assert 0.65 <= measured["worked_accuracy"] <= 0.75


def test_a_hinted_document_shows_the_worked_answer_as_opsd_would_and_trains_only_the_reply() -> None:
    question = "State the final answer to the following arithmetic problem: 8 + 3 - 1 ="
    worked = "<think>8+3=11\n11-1=10</think>10"
    rng = random.Random(0)
    documents = [maker.document(question, "10", rng, 0.0, 1.0) for _ in range(50)]
    hinted = [doc for doc in documents if DEFAULT_HINT.format(demonstration=worked) in doc[1][0]]
    assert len(hinted) > 25
    assert all([text for text, is_trained in doc if is_trained] == [f"{worked}<|im_end|>"] for doc in hinted)
    assert all(doc[3:5] == [("<|im_start|>user\n", False), (f"{question}<|im_end|>", False)] for doc in hinted)


def test_the_options_of_its_relatives_leave_the_start_models_documents_as_they_were(documents) -> None:
    """The hash is of the documents that the committed start model was made of."""
    text = json.dumps([document for _, document in documents])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "cb15f1d177e74f19"
