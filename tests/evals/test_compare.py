"""What is said of two evaluations of the same tasks: what changed, how likely by chance, and which two cannot be compared."""

import math
from itertools import product
from typing import Any

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.errors import ConfigError
from jaxrl.evals.compare import Comparison, compare, comparison_lines, mcnemar_p_value
from jaxrl.evals.result import EvalResult


def result(
    shares: dict[str, float | None], *, dataset: str = "sums", env_parameters: dict[str, Any] | None = None, **asked: Any
) -> EvalResult:
    """Return a result with these shares of successes."""
    config = EvalConfig(dataset=dataset, eval_parameters=EvalParameters(**asked), env_parameters=env_parameters or {})
    return EvalResult(config, "sums", 0, None, {"per_task": {task: {"success_rate": share} for task, share in shares.items()}})


def test_every_task_is_fixed_regressed_unchanged_errored_or_in_one_result_only() -> None:
    before = result({"a": 0.0, "b": 1.0, "c": 1.0, "d": 0.0, "e": None, "f": 1.0, "gone": 1.0})
    after = result({"new": 1.0, "f": None, "e": 1.0, "d": 0.0, "c": 1.0, "b": 0.0, "a": 1.0})
    assert compare(before, after) == Comparison(
        fixed=("a",),
        regressed=("b",),
        num_still_solved=1,
        num_still_unsolved=1,
        errored=("e", "f"),
        only_in_before=("gone",),
        only_in_after=("new",),
        p_value=1.0,
        success_rate_difference=0.0,
        success_rate_difference_se=math.sqrt(2 / 3) / 2,  # of 1, -1, 0, 0
    )
    assert compare(before, after).is_regression and compare(before, after).num_compared == 4


def test_a_task_of_several_episodes_is_solved_if_half_of_them_succeed_and_the_difference_counts_shares() -> None:
    sampled = {"samples_per_task": 4, "sampling": SamplingConfig(temperature=1.0)}
    before = result({"a": 0.25, "b": 0.5, "c": 1.0, "d": 0.75}, **sampled)
    after = result({"a": 0.5, "b": 0.25, "c": 0.75, "d": 1.0}, **sampled)
    found = compare(before, after)
    assert (found.fixed, found.regressed, found.num_still_solved) == (("a",), ("b",), 2)
    assert found.success_rate_difference == 0.0  # +1/4, -1/4, -1/4, +1/4
    assert found.success_rate_difference_se == pytest.approx(0.25 * math.sqrt(4 / 3) / 2)


def test_fixed_tasks_come_as_the_second_result_has_them_and_regressed_ones_as_the_first() -> None:
    before = result({"a": 0.0, "b": 0.0, "c": 1.0, "d": 1.0})
    found = compare(before, result({"d": 0.0, "c": 0.0, "b": 1.0, "a": 1.0}))
    assert (found.fixed, found.regressed) == (("b", "a"), ("c", "d"))


def test_comparing_the_other_way_round_swaps_fixed_and_regressed_and_keeps_the_p_value() -> None:
    before, after = result({"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0}), result({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
    there, back = compare(before, after), compare(after, before)
    assert set(there.fixed) == set(back.regressed) == {"a", "b", "c"} and there.regressed == back.fixed == ("d",)
    assert there.p_value == back.p_value == 0.625
    assert there.success_rate_difference == 0.5 and back.success_rate_difference == -0.5
    same = compare(before, before)
    assert not same.is_regression and same.p_value == 1.0 and same.success_rate_difference == 0.0


@pytest.mark.parametrize(("num_fixed", "num_regressed"), [(0, 0), (1, 1), (3, 1), (2, 6), (7, 0), (5, 5)])
def test_the_p_value_is_the_share_of_coin_tosses_that_are_at_least_as_unequal(num_fixed: int, num_regressed: int) -> None:
    n = num_fixed + num_regressed
    tosses = [abs(2 * sum(toss) - n) for toss in product((0, 1), repeat=n)]
    share = sum(unequal >= abs(num_fixed - num_regressed) for unequal in tosses) / len(tosses)
    assert mcnemar_p_value(num_fixed, num_regressed) == pytest.approx(share)


def test_the_p_value_of_thousands_of_changes_is_a_number() -> None:
    assert 0.9 < mcnemar_p_value(2500, 2500) <= 1.0 and mcnemar_p_value(3000, 2000) < 1e-40


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"dataset": "products"}, "dataset 'sums' before, 'products' after"),
        ({"split": "test"}, "split None before, 'test' after"),
        ({"seeds": (0, 1)}, r"seeds None before, \[0, 1\] after"),
        ({"limit": 7}, "limit None before, 7 after"),
        ({"success_threshold": 0.5}, "success_threshold 1.0 before, 0.5 after"),
        ({"samples_per_task": 2, "sampling": SamplingConfig()}, "samples_per_task 1 before, 2 after"),
    ],
)
def test_results_of_two_evaluations_are_refused_unless_forced_and_then_it_is_said(differs: dict[str, Any], said: str) -> None:
    before, after = result({"a": 0.0}), result({"a": 1.0}, **differs)
    with pytest.raises(ConfigError, match=f"not of the same evaluation: {said}"):
        compare(before, after)
    forced = compare(before, after, force=True)
    assert forced.fixed == ("a",) and forced.remarks[0].startswith("compared all the same: ")


def test_what_else_differs_is_remarked_and_who_was_measured_is_not() -> None:
    before = result({"a": 0.0}, model="small", env_parameters={"tiers": 1})
    after = result({"a": 0.0}, model="large", env_parameters={"tiers": 2}, sampling=SamplingConfig(temperature=0.0, max_tokens=8))
    assert compare(before, after).remarks == (
        "differs too: sampling.max_tokens 256 before, 8 after",
        "differs too: env_parameters.tiers 1 before, 2 after",
    )
    assert compare(before, result({"a": 0.0}, model="large", env_parameters={"tiers": 1})).remarks == ()


def test_results_without_a_task_in_common_are_refused_rather_than_called_unchanged() -> None:
    with pytest.raises(ConfigError, match="no task of the 1 before is among the 2 after"):
        compare(result({"a": 1.0}), result({"b": 0.0, "c": 0.0}))
    nothing = compare(result({"a": 1.0}), result({"b": 0.0}), force=True)
    assert (nothing.num_compared, nothing.success_rate_difference, nothing.p_value) == (0, None, 1.0)


def test_scores_alone_are_compared_with_a_remark_and_those_without_tasks_are_refused() -> None:
    scores = {"per_task": {"a": {"success_rate": 1.0}}}
    found = compare(scores, result({"a": 0.0}))
    assert found.regressed == ("a",) and found.success_rate_difference_se is None
    assert found.remarks == ("scores without their configuration: nothing tells whether both are of the same evaluation",)
    with pytest.raises(ConfigError, match="the second result has no scores by task"):
        compare(scores, {"success_rate": 0.5})


def test_the_lines_count_everything_and_list_so_many_ids() -> None:
    tasks = [f"t{index}" for index in range(5)]
    before = result(dict.fromkeys(tasks, 0.0) | {"was": 1.0, "e": None})
    after = result(dict.fromkeys(tasks, 1.0) | {"is": 1.0, "e": 0.0})
    assert comparison_lines(compare(before, after), max_listed=3) == [
        "5 tasks compared: 5 fixed, 0 regressed, 0 still solved, 0 still unsolved",
        "success rate +100.0 points (standard error 0.0); exact McNemar p = 0.0625",
        "fixed (5): t0, t1, t2 and 2 more",
        "without a score on one side (1): e",
        "only before (1): was",
        "only after (1): is",
    ]


def test_the_p_value_of_tens_of_thousands_of_changes_takes_no_time() -> None:
    assert mcnemar_p_value(20_000, 20_000) == 1.0 and 0 < mcnemar_p_value(19_700, 20_300) < 0.01


def test_scores_by_task_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="the second result has no scores by task"):
        compare({"per_task": {"a": {"success_rate": 1.0}}}, {"per_task": {"a": 1.0}})
