"""Scores of evaluation rows, by hand."""

import pytest

from jaxrl.evals import score_rows


def row(status: str, reward: float | None = None, **fields: object) -> dict:
    base = {"status": status, "reward": reward, "completion_tokens": 4, "is_truncated": False, "version": 3, "token_versions": [3]}
    return base | fields


def test_means_are_over_what_they_speak_of() -> None:
    rows = [
        row("ok", 1.0),
        row("ok", 0.5, completion_tokens=8, is_truncated=True),
        row("ok", 2.0, token_versions=[3, 4]),
        row("unscored", completion_tokens=12, is_truncated=True),
        row("error", completion_tokens=1000, is_truncated=True, token_versions=[]),
    ]
    assert score_rows(rows, success_threshold=1.0) == {
        "n_planned": 5.0,
        "n_scored": 3.0,
        "n_error": 1.0,
        "n_other_version": 1.0,
        "success_rate": pytest.approx(2 / 3),
        "mean_reward": pytest.approx(3.5 / 3),
        "mean_completion_tokens": 7.0,
        "truncated_frac": 0.5,
    }


def test_turns_and_what_rollouts_report_are_averaged_over_those_that_did_not_fail_and_have_them() -> None:
    rows = [
        row("ok", 1.0, turns=1, metrics={"tools/calls": 3.0, "forks": 2.0}),
        row("unscored", turns=4, metrics={"tools/calls": 0.0}),
        row("ok", 0.0, turns=1, metrics={}),
        row("error", turns=9, metrics={"tools/calls": 100.0}),
    ]
    scores = score_rows(rows, 1.0)
    assert (scores["mean_num_turns"], scores["tools/calls"], scores["forks"]) == (2.0, 1.5, 2.0)


def test_a_reported_number_never_takes_the_place_of_a_score() -> None:
    assert score_rows([row("ok", 1.0, metrics={"mean_reward": 7.0, "n_error": 7.0})], 1.0)["mean_reward"] == 1.0


def test_a_mean_over_nothing_is_absent_rather_than_zero_or_nan() -> None:
    assert score_rows([row("error", token_versions=[])], 1.0) == {"n_planned": 1, "n_scored": 0, "n_error": 1, "n_other_version": 0}
    assert "success_rate" not in score_rows([row("unscored")], 1.0)


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
