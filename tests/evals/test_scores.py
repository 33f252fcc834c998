"""Scores of evaluation rows, by hand."""

import json
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.evals import flat_scores, score_rows
from jaxrl.evals.scores import pass_at_k, pass_hat_k


def row(status: str, reward: float | None = None, **fields: object) -> dict:
    base = {"status": status, "reward": reward, "completion_tokens": 4, "is_truncated": False, "version": 3, "token_versions": [3]}
    return base | fields


def rows_of(outcomes: dict[str, list[float | None]]) -> list[dict]:
    """Return one row per reward of each task; None is an error."""
    return [
        row("error" if reward is None else "ok", reward, task_id=task, sample=sample)
        for task, rewards in outcomes.items()
        for sample, reward in enumerate(rewards)
    ]


def test_means_are_over_what_they_speak_of() -> None:
    rows = [
        row("ok", 1.0),
        row("ok", 0.5, completion_tokens=8, is_truncated=True),
        row("ok", 2.0, token_versions=[3, 4]),
        row("unscored", completion_tokens=12, is_truncated=True),
        row("error", completion_tokens=1000, is_truncated=True, token_versions=[]),
    ]
    assert score_rows(rows, success_threshold=1.0) == {
        "n_planned": 5,
        "n_scored": 3,
        "n_error": 1,
        "n_unscored": 1,
        "n_other_version": 1,
        "success_rate": pytest.approx(2 / 3),
        "success_rate_se": pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 3)),
        "mean_reward": pytest.approx(3.5 / 3),
        "success_rate_strict": 2 / 5,
        "error_rate": 1 / 5,
        "mean_completion_tokens": 7.0,
        "truncated_frac": 0.5,
        "per_task": {},
    }


def test_turns_and_what_rollouts_report_are_averaged_over_those_that_did_not_fail_and_have_them() -> None:
    rows = [
        row("ok", 1.0, turns=1, metrics={"tools/calls": 3.0, "forks": 2.0}),
        row("unscored", turns=4, metrics={"tools/calls": 0.0}),
        row("ok", 0.0, turns=1, metrics={}),
        row("error", turns=9, metrics={"tools/calls": 100.0}),
    ]
    scores = score_rows(rows, 1.0)
    assert (scores["mean_num_turns"], scores["metrics"]) == (2.0, {"forks": 2.0, "tools/calls": 1.5})


def test_a_reported_number_never_takes_the_place_of_a_score() -> None:
    scores = score_rows([row("ok", 1.0, metrics={"mean_reward": 7.0, "n_error": 7.0, "calls": 7.0})], 1.0)
    flat = flat_scores(scores)
    assert (flat["mean_reward"], flat["n_error"], flat["calls"]) == (1.0, 0.0, 7.0)


def test_a_mean_over_nothing_is_absent_rather_than_zero_or_nan() -> None:
    counts = {"n_planned": 1, "n_scored": 0, "n_error": 1, "n_unscored": 0, "n_other_version": 0}
    failed = score_rows([row("error", token_versions=[])], 1.0)
    assert failed == counts | {"success_rate_strict": 0.0, "error_rate": 1.0, "per_task": {}}
    assert "success_rate" not in score_rows([row("unscored")], 1.0)
    assert score_rows([], 1.0)["n_planned"] == 0


def test_the_threshold_decides_what_a_success_is() -> None:
    rows = [row("ok", 0.4), row("ok", 0.6)]
    assert [score_rows(rows, threshold)["success_rate"] for threshold in (0.0, 0.4, 0.5, 0.7)] == [1.0, 1.0, 0.5, 0.0]


def test_the_nll_of_demonstrations_is_a_mean_over_tokens_and_counts_failed_rollouts_too() -> None:
    rows = [
        row("ok", 1.0, demonstration_nll=3.0, demonstration_tokens=2),
        row("error", demonstration_nll=1.0, demonstration_tokens=6),
        row("ok", 0.0, demonstration_nll=None, demonstration_tokens=None),
        row("ok", 0.0),
    ]
    scores = score_rows(rows, 1.0)
    assert (scores["demonstration_nll"], scores["n_demonstrations"]) == (0.5, 2.0)


def test_the_standard_error_is_of_the_tasks_means_because_samples_of_a_task_are_not_independent() -> None:
    rows = rows_of({"a": [1, 1], "b": [0, 0], "c": [1, 0], "d": [1, None]})
    scores = score_rows([{**each, "difficulty": 3} for each in rows], 1.0)
    for of_all in (scores, scores["by_difficulty"]["3"]):
        assert of_all["success_rate"] == pytest.approx(4 / 7)
        assert of_all["success_rate_se"] == pytest.approx(np.std([1, 0, 0.5, 1]) / 2)
    single = score_rows(rows_of({"a": [1], "b": [0], "c": [0], "d": [0]}), 1.0)
    assert single["success_rate_se"] == pytest.approx(math.sqrt(0.25 * 0.75 / 4))


def test_the_strict_rate_takes_errors_and_missing_rewards_for_failures() -> None:
    scores = score_rows([row("ok", 1.0), row("error"), row("unscored"), row("ok", 1.0)], 1.0)
    assert (scores["success_rate"], scores["success_rate_strict"], scores["error_rate"]) == (1.0, 0.5, 0.25)


def test_the_outcome_of_a_task_is_told_from_its_scored_episodes() -> None:
    outcomes = {"won": [1, None], "lost": [0, 0.5], "both": [1, 0.5], "broken": [None, None]}
    assert score_rows(rows_of(outcomes), 1.0)["per_task"] == {
        "won": {"outcome": "pass", "success_rate": 1.0, "reward": 1.0, "n": 2, "n_scored": 1},
        "lost": {"outcome": "fail", "success_rate": 0.0, "reward": 0.25, "n": 2, "n_scored": 2},
        "both": {"outcome": "mixed", "success_rate": 0.5, "reward": 0.75, "n": 2, "n_scored": 2},
        "broken": {"outcome": "error", "success_rate": None, "reward": None, "n": 2, "n_scored": 0},
    }


def test_difficulties_are_told_apart_by_number_and_come_in_order() -> None:
    rows = [
        row("ok", 1.0, difficulty=10, group="b"),
        row("ok", 0.0, difficulty=2, group="a"),
        row("error", difficulty=2.0),
        row("ok", 0.5, difficulty=0.5, group="a"),
        row("ok", 1.0),
    ]
    scores = score_rows(rows, 1.0)
    assert list(scores["by_difficulty"]) == ["0.5", "2", "10"] and list(scores["by_group"]) == ["a", "b"]
    assert scores["by_difficulty"]["2"] == {"n": 2, "n_scored": 1, "success_rate": 0.0, "success_rate_se": 0.0, "mean_reward": 0.0}
    assert scores["by_group"]["a"] == {"n": 2, "n_scored": 2, "success_rate": 0.0, "success_rate_se": 0.0, "mean_reward": 0.25}
    assert flat_scores(scores)["by_difficulty/10/success_rate"] == 1.0


def test_flat_scores_are_numbers_and_leave_single_tasks_out() -> None:
    flat = flat_scores(score_rows(rows_of({"a": [1, 0], "b": [1, 1]}), 1.0) | {"reproducible": False, "probes": [{"n": 1}]})
    assert all(type(value) is float for value in flat.values())
    assert (flat["pass@2"], flat["pass^2"], flat["n_excluded@2"], flat["reproducible"]) == (1.0, 0.5, 0.0, 0.0)
    assert not [name for name in flat if name.startswith(("per_task", "probes"))]
    assert "reproducible" not in flat_scores({"reproducible": None})


def test_pass_at_k_of_three_successes_in_eight() -> None:
    scores = score_rows(rows_of({"a": [1, 0, 0, 1, 0, 1, 0, 0]}), 1.0)
    assert [round(scores["pass@k"][str(k)], 6) for k in range(1, 9)] == [0.375, 0.642857, 0.821429, 0.928571, 0.982143, 1, 1, 1]
    assert [round(scores["pass^k"][str(k)], 6) for k in range(1, 9)] == [0.375, 0.107143, 0.017857, 0, 0, 0, 0, 0]


def test_a_task_with_fewer_than_k_scored_samples_is_left_out_of_k_and_counted() -> None:
    scores = score_rows(rows_of({"a": [1, 0, 0], "b": [1, None, None], "c": [None, None, None]}), 1.0)
    assert scores["pass@k"] == {"1": pytest.approx((1 / 3 + 1) / 2), "2": pytest.approx(2 / 3), "3": 1.0}
    assert scores["n_excluded@k"] == {"1": 1, "2": 2, "3": 2}
    assert "pass@k" not in score_rows(rows_of({"a": [1], "b": [0]}), 1.0)


def test_the_seeds_of_a_task_are_questions_of_their_own() -> None:
    rows = [
        row("ok", reward, task_id="a", seed=seed, sample=s)
        for seed, rewards in ((0, [1, 1]), (1, [0, 0]))
        for s, reward in enumerate(rewards)
    ]
    scores = score_rows(rows, 1.0)
    assert (scores["pass@k"]["2"], scores["pass^k"]["2"]) == (0.5, 0.5)
    assert scores["per_task"]["a"]["outcome"] == "mixed"


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_and_rises_with_k_while_pass_hat_k_falls(successes: list[bool], data: st.DataObject) -> None:
    n, c = len(successes), sum(successes)
    k = data.draw(st.integers(1, n))
    subsets = list(combinations(successes, k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))
    assert pass_hat_k(n, c, k) == pytest.approx(np.mean([all(subset) for subset in subsets]))
    assert all(pass_at_k(n, c, j) <= pass_at_k(n, c, j + 1) for j in range(1, n))
    assert all(pass_hat_k(n, c, j) >= pass_hat_k(n, c, j + 1) for j in range(1, n))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=4, max_size=4), min_size=1, max_size=6))
def test_of_one_set_of_full_tasks_pass_at_k_rises_with_k_and_scores_survive_json(outcomes: list[list[float | None]]) -> None:
    full = {str(i): [0.0 if reward is None else reward for reward in rewards] for i, rewards in enumerate(outcomes)}
    by_k = list(score_rows(rows_of(full), 1.0)["pass@k"].values())
    assert by_k == sorted(by_k)
    rows = rows_of({str(i): rewards for i, rewards in enumerate(outcomes)})
    scores = score_rows(rows, 1.0)
    assert json.dumps(score_rows(json.loads(json.dumps(rows)), 1.0)) == json.dumps(scores)


def test_what_an_environment_reports_takes_the_name_of_no_score_not_even_of_one_that_there_is_none_of() -> None:
    taken = {"success_rate": 1.0, "pass@2": 1.0, "by_group/a/n": 9.0, "reproducible": 1.0, "policy_version": 7.0, "training_cost": 3.0}
    scores = score_rows([row("unscored", task_id="a", metrics={**taken, "calls": 2.0})], 1.0)
    assert flat_scores(scores)["calls"] == 2.0 and not set(taken) & set(flat_scores(scores))
    full = rows_of({"a": [1, 0], "b": [None, 1]})
    more = {"difficulty": 1, "group": "g", "turns": 1, "demonstration_nll": 1.0, "demonstration_tokens": 2}
    every = score_rows([each | more for each in full], 1.0)
    own = flat_scores(every | {"reproducible": True, "different_tasks": True})
    assert "demonstration_nll" in own and "pass@2" in own
    assert flat_scores({"metrics": dict.fromkeys(own, 5.0)}) == {}, "each of them is kept for the score"


def test_groups_with_names_that_look_like_numbers_that_cannot_be_sorted_come_in_one_order() -> None:
    names = ["nan", "b", "inf", "2", "a", "10", "-inf"]
    orders = {
        tuple(score_rows([row("ok", 1.0, task_id=str(i), group=name) for i, name in enumerate(order)], 1.0)["by_group"])
        for order in (names, names[::-1], sorted(names))
    }
    assert orders == {("2", "10", "-inf", "a", "b", "inf", "nan")}


def test_a_token_of_another_version_than_the_held_one_is_counted_once_per_episode() -> None:
    seen = [(3, [3]), (3, [4]), (3, [3, 4]), (3, []), (None, [4]), (4, [4])]
    rows = [row("ok", 1.0, task_id=str(i), version=held, token_versions=versions) for i, (held, versions) in enumerate(seen)]
    assert score_rows(rows, 1.0)["n_other_version"] == 2
