"""Several attempts with a hint after each: when it ends, what it is worth, what is said."""

import contextlib

import pytest

from jaxrl.config.env import FeedbackEnvConfig
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.answers import exact_match
from jaxrl.envs.build import build_environment
from jaxrl.envs.feedback import FeedbackEnvironment, feedback_environment, hint_after
from jaxrl.envs.play import play_rollout
from jaxrl.envs.text_session import demonstration_session
from jaxrl.envs.transcript import Window
from jaxrl.types import Rollout
from tests.envs.policies import RENDERER, ids_of, make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

SPEC = {"id": "sum", "question": "8 + 3 =", "answer": "11"}


def sums(**options) -> FeedbackEnvironment:  # type: ignore[no-untyped-def]
    settings = {"score": exact_match, "hint": "Wrong, {left} left.", "budget": BudgetConfig(max_turns=3)}
    return FeedbackEnvironment("sums", [SPEC], **(settings | options))


async def played(env: FeedbackEnvironment, *texts: str, endpoint: ScriptedEndpoint | None = None) -> Rollout:
    rollout = make_rollout(dict(env.tasks()[0]))
    await play_rollout(env, rollout, open_session(endpoint or saying(*texts), rollout), 60.0)
    return rollout


def heard(rollout: Rollout) -> list[str]:
    """Return what the policy was told after the question."""
    return [node.content for node in rollout.nodes if node.role == "user"][1:]


async def test_a_right_answer_ends_it_at_once() -> None:
    rollout = await played(sums(), "11")
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated, rollout.num_turns) == (1.0, "solved", False, 1)


async def test_each_wrong_answer_is_followed_by_a_hint_and_costs_a_discount() -> None:
    rollout = await played(sums(discount=0.5), "10", "12", "11")
    assert heard(rollout) == ["Wrong, 2 left.", "Wrong, 1 left."]
    assert (rollout.reward, rollout.stop_reason, rollout.turn_rewards) == (0.25, "solved", None)


async def test_running_out_of_attempts_is_worth_the_last_one_and_cuts_nothing_short() -> None:
    rollout = await played(sums(), "10", "12", "13")
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated, rollout.num_turns) == (0.0, "max_turns", False, 3)


async def test_each_attempt_may_be_rewarded_as_a_turn() -> None:
    worth = {"a": 0.5, "b": 0.0, "c": 1.0}
    env = sums(score=lambda spec, text: worth[text], discount=0.5, turn_rewards=True)
    rollout = await played(env, "a", "b", "c")
    assert rollout.turn_rewards == [0.5, 0.0, 0.25] and rollout.reward == 0.25


async def test_an_attempt_that_the_token_limit_cut_is_wrong_and_the_last_one() -> None:
    rollout = await played(sums(), endpoint=ScriptedEndpoint(lambda request, version: ids_of("11")))
    assert (rollout.reward, rollout.stop_reason, rollout.is_truncated) == (0.0, "max_tokens", True)


async def test_an_attempt_that_cannot_be_scored_leaves_the_rollout_without_a_reward() -> None:
    rollout = await played(sums(score=lambda spec, text: None), "1", "2", "3")
    assert rollout.failure is None and (rollout.reward, rollout.stop_reason) == (None, "max_turns")


async def test_a_scorer_that_raises_is_the_graders_failure() -> None:
    rollout = await played(sums(score=lambda spec, text: 1 / 0), "11")
    assert rollout.failure is not None and (str(rollout.failure.boundary), rollout.failure.type) == ("grader", "ZeroDivisionError")


@pytest.mark.parametrize(
    ("text", "answer", "direction"),
    [
        ("10", "11", "too low"),
        ("<think>11</think> 12.5", "11", "too high"),
        ("-3", "-4", "too high"),
        ("11.0", "11", ""),
        ("eleven", "11", "not a number"),
        ("nan", "11", "not a number"),
        ("11", "eleven", ""),
        ("11", None, ""),
    ],
)
def test_a_hint_says_of_a_number_on_which_side_of_the_answer_it_is(text: str, answer: str | None, direction: str) -> None:
    assert hint_after("{attempt}/{left}: {direction}", text, answer, attempt=2, left=1) == f"2/1: {direction}"


def configured(**options) -> FeedbackEnvConfig:  # type: ignore[no-untyped-def]
    settings = {"dataset": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "num_tasks": 20}
    return FeedbackEnvConfig.model_validate(settings | options)


async def test_it_is_built_from_a_config_and_plays_its_own_demonstration() -> None:
    env = feedback_environment(configured(hint="No: {direction}.", system_prompt="Answer.", budget={"max_turns": 2}))
    spec = env.tasks()[0]
    rollout = await played(env, "999", spec["answer"])
    assert [node.role for node in rollout.nodes] == ["system", "user", "assistant", "user", "assistant"]
    assert heard(rollout) == ["No: too high."] and rollout.reward == 1.0
    shown = make_rollout(spec)
    await play_rollout(env, shown, demonstration_session(shown, RENDERER, env.demonstration, window=Window(512)), 10.0)
    assert (shown.reward, shown.num_turns, shown.stop_reason) == (1.0, 1, "solved")


async def test_a_reward_of_the_users_judges_every_attempt() -> None:
    reward = PythonRewardConfig(import_path="tests.envs.grading.misbehaving:act")
    with contextlib.closing(build_environment(configured(reward=reward))) as env:
        assert isinstance(env, FeedbackEnvironment)
        rollout = await played(env, "0.5", "int")  # worth 0.5 and 2
    assert (rollout.reward, rollout.stop_reason, rollout.num_turns) == (2.0, "solved", 2)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ("{answer}", r"`hint`='\{answer\}' cannot be filled in: there is no field 'answer', there are 'attempt', 'left' and 'direction'"),
        ("{attempt.real}", "there is no field 'attempt.real'"),
        ("{", "a brace that is meant as one is written twice"),
        ("{}", "there is no field ''"),
        ("{left:{attempt}{x}}", "cannot be filled in"),
        ("{left:w}", "cannot be filled in"),
        ("", "hint"),
    ],
)
def test_a_hint_that_cannot_be_filled_in_is_refused(hint: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(hint=hint)
    assert configured(hint="{{}} {left:02d}").hint
