"""`jaxrl.envs.verifiers.verdicts`: what verifiers says of an episode, and its zeros that are no rewards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.gateway.talk import Talk
from jaxrl.envs.verifiers.verdicts import Verdict, outcome_of, read_episode
from tests.envs.policies import open_session, saying


def error(kind: str, message: str) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message=message)


def a_trace(**fields: Any) -> SimpleNamespace:
    """Return a trace as verifiers 0.4 has it, of one reply, scored 1; `scoring_start` is when scoring began, 0 if it did not."""
    defaults = {
        "id": "t", "ok": True, "errors": [], "rewards": {"right": SimpleNamespace(value=1.0)}, "metrics": {}, "num_turns": 1,
        "agent": SimpleNamespace(name="agent", trainable=True), "stop_condition": "agent_completed", "is_truncated": False,
        "is_timeout": False, "response_rewrites": [], "assistant_messages": [SimpleNamespace(content="4")],
        "timing": SimpleNamespace(scoring=SimpleNamespace(start=fields.pop("scoring_start", 1.0))),
    }  # fmt: skip
    return SimpleNamespace(**defaults | fields)


def episode(*traces: SimpleNamespace, ok: bool = True, errors: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(ok=ok and all(trace.ok for trace in traces), errors=list(errors), traces=list(traces))


def reward(value: float) -> SimpleNamespace:
    return SimpleNamespace(value=value)


@pytest.mark.parametrize(("rewards", "expected"), [
    ({"right": reward(1.0), "format": reward(-0.25)}, 0.75),
    ({"right": reward(0.0)}, 0.0),
    ({}, None),
    ({"right": None}, None),
    ({"right": reward(1.0), "judge": None}, None),
])  # fmt: skip
def test_a_reward_is_the_sum_of_all_and_is_missing_if_one_of_them_is(rewards: dict[str, Any], expected: float | None) -> None:
    assert read_episode(episode(a_trace(rewards=rewards))).reward == expected


@pytest.mark.parametrize(("told", "words", "is_grading"), [
    (episode(a_trace(ok=False, errors=[error("A", "first"), error("HarnessError", "exited 1")], scoring_start=0.0)),
     "HarnessError: exited 1", False),
    (episode(a_trace(ok=False, errors=[error("TaskError", "scoring: KeyError")])), "TaskError: scoring: KeyError", True),
    (episode(a_trace(ok=False, scoring_start=0.0)), "failed, and not why", False),
    (episode(a_trace(), ok=False, errors=[error("EnvError", "finalize")]), "EnvError: finalize", False),
    (episode(ok=False, errors=[error("EnvError", "setup: no key")]), "EnvError: setup: no key", False),
    (episode(a_trace(agent=SimpleNamespace(name="solver", trainable=True)), a_trace()), "2 traces, of these agents: agent, solver", False),
    (episode(), "0 traces, of these agents: none", False),
    (episode(a_trace(agent=SimpleNamespace(name="judge", trainable=False))), "agent 'judge' is not to be trained", False),
])  # fmt: skip
def test_an_episode_that_failed_says_why_and_whether_its_scoring_did(told: SimpleNamespace, words: str, is_grading: bool) -> None:
    verdict = read_episode(told)
    assert verdict.error is not None and words in verdict.error and verdict.is_grading == is_grading


def test_an_error_is_not_repeated_without_end() -> None:
    verdict = read_episode(episode(a_trace(ok=False, errors=[error("HarnessError", "x" * 10**6)])))
    assert verdict.error is not None and len(verdict.error) == 2000


def talk(*told: str, limit: str | None = None) -> Talk:
    talk = Talk(open_session(saying()), BudgetConfig())
    talk.told = [{"role": "assistant", "content": text} for text in told]
    talk.limit = limit
    return talk


@pytest.mark.parametrize(("fields", "stop_reason", "is_truncated"), [
    ({}, "done", False),
    ({"is_truncated": True}, "max_tokens", True),
    ({"stop_condition": "max_turns", "is_truncated": True}, "max_turns", True),
    ({"stop_condition": "max_output_tokens", "is_truncated": True}, "max_completion_tokens", True),
    ({"stop_condition": "agent_timeout", "is_timeout": True}, "max_duration", True),
    ({"stop_condition": "is_solved"}, "is_solved", False),
    ({"stop_condition": None}, "done", False),
])  # fmt: skip
def test_what_stopped_an_episode_is_told_in_the_words_of_other_environments(
    fields: dict[str, Any], stop_reason: str, is_truncated: bool
) -> None:
    outcome = outcome_of(read_episode(episode(a_trace(**fields))), talk("4"), "env 'toy'")
    assert (outcome.stop_reason, outcome.is_truncated, outcome.reward) == (stop_reason, is_truncated, 1.0)


def test_several_rewards_are_metrics_each_and_one_is_not() -> None:
    rewards = {"right": reward(1.0), "format": reward(0.5)}
    outcome = outcome_of(read_episode(episode(a_trace(rewards=rewards, metrics={"chars": 3.0}))), talk("4"), "env 'toy'")
    assert outcome.metrics == {"chars": 3.0, "reward/right": 1.0, "reward/format": 0.5}
    assert outcome_of(read_episode(episode(a_trace())), talk("4"), "env 'toy'").metrics == {}


def test_a_reply_that_the_taskset_rewrote_is_counted_and_its_words_are_not_compared() -> None:
    verdict = read_episode(episode(a_trace(response_rewrites=[object()])))
    assert (verdict.num_replies, verdict.replies) == (1, None)
    assert outcome_of(verdict, talk("what was sampled"), "env 'toy'").reward == 1.0


def test_a_reply_that_the_taskset_threw_away_is_the_policys_all_the_same() -> None:
    assert outcome_of(Verdict(rewards={"right": 0.0}, num_replies=1, replies=["4"]), talk("4", "5"), "env 'toy'").reward == 0.0


def test_a_limit_of_the_run_is_told_before_that_of_verifiers() -> None:
    outcome = outcome_of(read_episode(episode(a_trace())), talk("4", limit="max_duration"), "env 'toy'")
    assert (outcome.stop_reason, outcome.is_truncated, outcome.reward) == ("max_duration", True, 1.0)
