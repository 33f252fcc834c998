"""The answer in a reply, and the exact comparison."""

import pytest

from jaxrl.envs.answers import exact_match, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("18", "18"),
        (" 18\n", "18"),
        ("<think>8+3=11\n11+7=18</think>18", "18"),
        ("<think>a</think>1<think>b</think> 18 ", "18"),
        ("<think>18", "<think>18"),
        ("</think>", ""),
        ("", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_thought(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["13037", "-3037", "the answer is 3037", "3037.0", "3,037", "", "<think>3037</think>"])
def test_exact_match_gives_nothing_for_a_reply_that_merely_holds_the_answer(text: str) -> None:
    assert exact_match({"answer": "3037"}, text) == 0.0
    assert exact_match({"answer": "3037"}, "<think>1+1</think>3037") == 1.0
