"""What a set of evaluation rows says about a policy.

In: one row per planned episode, as `evals.episodes` makes them. Out: scores by name, computed from the rows alone, so
that a file of rows can be scored again. An episode that failed or has no reward is counted, never taken for a wrong
answer; a score of nothing is absent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]

_FAMILIES = ("pass@k", "pass^k", "n_excluded@k")
_NOT_FLAT = ("per_task", "probes", "metrics")
_OWN = frozenset({
    "n_planned", "n_scored", "n_error", "n_unscored", "n_other_version", "success_rate", "success_rate_se", "success_rate_strict",
    "mean_reward", "error_rate", "mean_completion_tokens", "mean_num_turns", "truncated_frac", "demonstration_nll", "n_demonstrations",
    "reproducible", "different_tasks", "policy_version", "training_episodes", "training_cost",
})  # fmt: skip
"""Names that a number of an environment's never takes, whether there is such a score this time or not; those of training included."""
_OWN_BEGINNINGS = (*(name[:-1] for name in _FAMILIES), "by_difficulty/", "by_group/")


def score_rows(rows: Sequence[Row], success_threshold: float) -> dict[str, Any]:
    """Score the rows of one evaluation of one environment.

    Args:
      rows: one per planned episode; `status` is ok, unscored or error, `reward` a number where the status is ok.
      success_threshold: an episode whose reward reaches this is a success.

    Returns:
      A JSON object, always with its keys in the same order. A mean over nothing is absent.
      Counts: `n_planned`, `n_scored`, `n_error`, `n_unscored`, and `n_other_version` (episodes with a token of another version than the
      one that was held, after a hold ran past its deadline).
      Over the scored episodes: `success_rate`, its standard error `success_rate_se` (the standard deviation of the tasks' means over the
      root of their number, which for one episode per task is sqrt(p(1-p)/n)), `mean_reward`.
      Over all: `success_rate_strict`, in which what failed or was not scored is no success, and `error_rate`.
      Over the episodes that did not fail: `mean_completion_tokens` (of those whose tokens somebody counted), `mean_num_turns`,
      `truncated_frac`.
      `demonstration_nll`, where rows tell what the policy says of the tasks' demonstrations: nats per token, over all of their tokens,
      and `n_demonstrations`.
      With several samples of a question (one task and seed), by k: `pass@k`, that one of k is a success, `pass^k`, that all k are, each
      without bias and averaged over the questions with k scored samples, and `n_excluded@k`, how many questions have fewer.
      `by_difficulty` and `by_group`: `n`, `n_scored`, `success_rate`, `success_rate_se` and `mean_reward` of each kind of task.
      `metrics`: the mean of each number that the environment reports, over the episodes that did not fail and have it.
      `prompt_sha`: the hash of the first prompt that there was.
      `per_task`: by id, its `outcome` (`pass` and `fail` if all its scored episodes were, `mixed`, or `error` if none was scored), its
      `success_rate` and mean `reward` (null if none was scored), `n` and `n_scored`.

    Example:
      >>> row = {"task_id": "a", "status": "ok", "reward": 1.0, "completion_tokens": 3, "is_truncated": False, "version": 0,
      ...        "token_versions": [0]}
      >>> score_rows([row, {**row, "reward": 0.0}, {**row, "status": "error", "reward": None}], 1.0)["success_rate"]
      0.5
    """
    played = [row for row in rows if row["status"] != "error"]
    scores: dict[str, Any] = _counts(rows) | _rates(rows, success_threshold)
    if played:
        if tokens := [row["completion_tokens"] for row in played if row["completion_tokens"] is not None]:
            scores["mean_completion_tokens"] = _mean(tokens)
        if turns := [row["turns"] for row in played if "turns" in row]:
            scores["mean_num_turns"] = _mean(turns)
        scores["truncated_frac"] = _mean([row["is_truncated"] for row in played])
    scores |= _demonstrations(rows) | _pass_scores(rows, success_threshold)
    for name in ("difficulty", "group"):
        if kinds := _by(rows, lambda row, name=name: _label(row.get(name))):
            scores[f"by_{name}"] = {kind: _kind(kinds[kind], success_threshold) for kind in sorted(kinds, key=_in_order)}
    if reported := _means_of_reported(played):
        scores["metrics"] = reported
    if shown := next((row["prompt_sha"] for row in rows if row.get("prompt_sha")), None):
        scores["prompt_sha"] = shown
    tasks = _by(rows, lambda row: row.get("task_id"))
    return scores | {"per_task": {str(task): _task(tasks[task], success_threshold) for task in tasks}}


def flat_scores(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores that are numbers, by path: what metrics and reports take.

    What an environment reports stands under its own name, unless a score is called alike; single tasks are left out.

    Example:
      >>> flat_scores({"n_planned": 2, "pass@k": {"2": 0.5}, "by_group": {"a": {"n": 2}}, "metrics": {"calls": 3.0}, "reproducible": True})
      {'calls': 3.0, 'n_planned': 2.0, 'pass@2': 0.5, 'by_group/a/n': 2.0, 'reproducible': 1.0}
    """
    reported = scores.get("metrics")
    flat = {name: float(value) for name, value in reported.items()} if isinstance(reported, Mapping) else {}
    own = dict(_numbers({name: value for name, value in scores.items() if name not in _NOT_FLAT}))
    return {name: value for name, value in flat.items() if name not in _OWN and not name.startswith(_OWN_BEGINNINGS)} | own


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that at least one of k of the samples, drawn without replacement, is a success: 1 - C(n-c, k) / C(n, k).

    Paper: Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374

    Example:
      >>> [round(pass_at_k(8, 3, k), 6) for k in (1, 2, 4, 6)]
      [0.375, 0.642857, 0.928571, 1.0]
    """
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_successes: int, k: int) -> float:
    """Return the probability that all of k of the samples, drawn without replacement, are successes: C(c, k) / C(n, k).

    Paper: tau-bench, https://arxiv.org/abs/2406.12045

    Example:
      >>> [round(pass_hat_k(8, 3, k), 6) for k in (1, 2, 3, 4)]
      [0.375, 0.107143, 0.017857, 0.0]
    """
    return math.comb(num_successes, k) / math.comb(num_samples, k)


def _counts(rows: Sequence[Row]) -> dict[str, Any]:
    statuses = [row["status"] for row in rows]
    return {
        "n_planned": len(rows),
        "n_scored": statuses.count("ok"),
        "n_error": statuses.count("error"),
        "n_unscored": statuses.count("unscored"),
        "n_other_version": sum(row["version"] is not None and set(row["token_versions"]) - {row["version"]} != set() for row in rows),
    }


def _rates(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    rates = _scored_rates(rows, threshold)
    if rows:
        rates["success_rate_strict"] = _mean([row["status"] == "ok" and _is_success(row, threshold) for row in rows])
        rates["error_rate"] = _mean([row["status"] == "error" for row in rows])
    return rates


def _scored_rates(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Return what is computed over the scored rows; nothing without any."""
    scored = [row for row in rows if row["status"] == "ok"]
    if not scored:
        return {}
    per_task = [_mean([_is_success(row, threshold) for row in of_task]) for of_task in _by(scored, _task_of).values()]
    return {
        "success_rate": _mean([_is_success(row, threshold) for row in scored]),
        "success_rate_se": float(np.std(per_task)) / math.sqrt(len(per_task)),
        "mean_reward": _mean([row["reward"] for row in scored]),
    }


def _pass_scores(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Return the scores by k, for k up to the number of samples of a question; none if each has one."""
    num_samples = 1 + max((row.get("sample", 0) for row in rows), default=0)
    if num_samples == 1:
        return {}
    # The unit is a task with its seed: another seed may be another question.
    questions = _by(rows, lambda row: (_task_of(row), repr(row.get("seed")))).values()
    scored = [[_is_success(row, threshold) for row in question if row["status"] == "ok"] for question in questions]
    scores: dict[str, dict[str, Any]] = {name: {} for name in _FAMILIES}
    for k in range(1, num_samples + 1):
        full = [(len(samples), sum(samples)) for samples in scored if len(samples) >= k]
        if full:
            scores["pass@k"][str(k)] = _mean([pass_at_k(n, c, k) for n, c in full])
            scores["pass^k"][str(k)] = _mean([pass_hat_k(n, c, k) for n, c in full])
        scores["n_excluded@k"][str(k)] = len(scored) - len(full)
    return {name: values for name, values in scores.items() if values}


def _demonstrations(rows: Sequence[Row]) -> dict[str, Any]:
    shown = [row for row in rows if row.get("demonstration_tokens")]
    if not shown:
        return {}
    num_tokens = sum(row["demonstration_tokens"] for row in shown)
    return {"demonstration_nll": float(sum(row["demonstration_nll"] for row in shown) / num_tokens), "n_demonstrations": len(shown)}


def _kind(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Return the scores of the tasks of one difficulty or group."""
    num_scored = sum(row["status"] == "ok" for row in rows)
    return {"n": len(rows), "n_scored": num_scored, **_scored_rates(rows, threshold)}


def _task(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Return how one task went."""
    scored = [row for row in rows if row["status"] == "ok"]
    successes = [_is_success(row, threshold) for row in scored]
    outcome = "error" if not scored else "pass" if all(successes) else "mixed" if any(successes) else "fail"
    reward = _mean([row["reward"] for row in scored]) if scored else None
    rate = _mean(successes) if scored else None
    return {"outcome": outcome, "success_rate": rate, "reward": reward, "n": len(rows), "n_scored": len(scored)}


def _means_of_reported(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each number that rows report, over the rows that have it."""
    reported: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.get("metrics", {}).items():
            reported.setdefault(name, []).append(value)
    return {name: _mean(reported[name]) for name in sorted(reported)}


def _is_success(row: Row, threshold: float) -> bool:
    return row["reward"] >= threshold


def _task_of(row: Row) -> Any:
    return row.get("task_id", id(row))


def _by(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return rows by a key, in the order in which keys come up; a row whose key is None is left out."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if (of_row := key(row)) is not None:
            found.setdefault(of_row, []).append(row)
    return found


def _label(value: Any) -> str | None:
    """Return the name of a kind of task; 1 and 1.0 are one."""
    if value is None or isinstance(value, bool):
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _in_order(label: str) -> tuple[int, float, str]:
    """Return what labels are sorted by: numbers by their size, before words."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(label)):  # a group may be called "nan", which is less than nothing and no less
            return 0, number, label
    return 1, 0.0, label


def _numbers(scores: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in scores.items():
        if name in _FAMILIES and isinstance(value, Mapping):
            yield from ((f"{name[:-1]}{k}", float(number)) for k, number in value.items())
        elif isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, int | float):
            yield path + name, float(value)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))
