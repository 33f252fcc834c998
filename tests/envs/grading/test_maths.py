"""The reward of mathematics: equal values count, however they are written; words and other values do not."""

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs math-verify, which `make setup` installs")

from jaxrl.config.env import QuestionsEnvConfig
from jaxrl.config.reward import MathVerifyRewardConfig
from jaxrl.envs.build import build_environment
from jaxrl.envs.grading.maths import math_verify_score
from jaxrl.envs.play import play_rollout
from jaxrl.types import Boundary
from tests.envs.policies import make_rollout, open_session, saying


@pytest.mark.parametrize(
    ("answer", "reply", "reward"),
    [
        ("42", "42", 1.0),
        ("42", "<think>41? 43?</think> The answer is 42.", 1.0),
        ("42", "<think>42</think> 43", 0.0),
        ("42", "43", 0.0),
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", r"so it is $\frac{2}{4}$", 1.0),
        (r"$\frac{1}{2}$", r"first 3, then \boxed{1/2}", 1.0),
        (r"\boxed{12}", r"it is \boxed{12}", 1.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("x^2 + 2x + 1", "(x+1)^2", 1.0),
        ("x^2 + 2x + 1", "$(x-1)^2$", 0.0),
        (r"\sqrt{2}", r"$2^{1/2}$", 1.0),
        (r"2\pi", "2", 0.0),
        ("1,234", "1234", 1.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
        ("42", r"\frac{", 0.0),
        ("42", "$" * 50 + "{" * 50, 0.0),
    ],
)
def test_a_reply_is_worth_one_if_its_answer_equals_the_right_one(answer: str, reply: str, reward: float) -> None:
    assert math_verify_score({"answer": answer}, reply) == reward


@pytest.mark.parametrize("answer", ["", "   ", None])
def test_an_answer_that_is_no_mathematics_is_an_error_and_no_zero(answer: str | None) -> None:
    with pytest.raises(ValueError, match=r"the task's `answer` .* cannot be read as mathematics"):
        math_verify_score({"answer": answer}, "42")


async def test_it_scores_an_environments_replies_in_a_worker_process(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a?", "answer": "1/2"}\n{"question": "b?", "answer": "?"}\n')
    config = QuestionsEnvConfig(path=str(path), split="all", reward=MathVerifyRewardConfig())
    rollouts = []
    with contextlib.closing(build_environment(config)) as env:
        for spec in env.tasks():
            rollouts.append(make_rollout(spec))
            await play_rollout(env, rollouts[-1], open_session(saying("it is 0.5"), rollouts[-1]), 60.0)
    assert rollouts[0].reward == 1.0 and rollouts[0].failure is None
    assert rollouts[1].failure is not None and rollouts[1].failure.boundary is Boundary.GRADER
    assert "raised ValueError: the task's `answer` '?' cannot be read as mathematics" in rollouts[1].failure.message
