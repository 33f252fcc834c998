"""What a set of evaluation rows says about a policy.

In: one row per planned rollout, as `evals.harness` writes them. Out: scores by name, computed from the rows alone, so
that a file of rows can be scored again. A rollout that failed or has no reward is counted, never taken for a wrong
answer; a score of nothing is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def score_rows(rows: Sequence[Mapping[str, Any]], success_threshold: float) -> dict[str, float]:
    """Score the rows of one evaluation of one environment.

    Args:
      rows: one per planned rollout; `status` is ok, unscored or error, `reward` a number where the status is ok.
      success_threshold: a rollout whose reward reaches this is a success.

    Returns:
      `n_planned`, `n_scored`, `n_error`, and `n_other_version` (rollouts with a token of another version than the one
      that was held, after a hold ran past its deadline); `success_rate` and `mean_reward` over the scored rollouts;
      `mean_completion_tokens`, `mean_num_turns` and `truncated_frac` over the rollouts that did not fail; the mean of
      each number in `metrics` over those of them that have it, under its own name. `demonstration_nll`, where
      rows tell what the policy says of the tasks' demonstrations: nats per token, over all of their tokens, and
      `n_demonstrations`. A mean over nothing is absent. A score keeps its name against a number that is called alike.

    Example:
      >>> row = {"status": "ok", "reward": 1.0, "completion_tokens": 3, "is_truncated": False, "version": 0,
      ...        "token_versions": [0]}
      >>> score_rows([row, {**row, "reward": 0.0}, {**row, "status": "error", "reward": None}], 1.0)["success_rate"]
      0.5
    """
    rewards = np.asarray([row["reward"] for row in rows if row["status"] == "ok"], np.float64)
    played = [row for row in rows if row["status"] != "error"]
    scores = {
        "n_planned": float(len(rows)),
        "n_scored": float(len(rewards)),
        "n_error": float(len(rows) - len(played)),
        "n_other_version": float(sum(set(row["token_versions"]) - {row["version"]} != set() for row in rows)),
    }
    if len(rewards):
        scores["success_rate"] = float(np.mean(rewards >= success_threshold))
        scores["mean_reward"] = float(np.mean(rewards))
    if played:
        scores["mean_completion_tokens"] = float(np.mean([row["completion_tokens"] for row in played]))
        if turns := [row["turns"] for row in played if "turns" in row]:
            scores["mean_num_turns"] = float(np.mean(turns))
        scores["truncated_frac"] = float(np.mean([row["is_truncated"] for row in played]))
    shown = [row for row in rows if row.get("demonstration_tokens")]
    if shown:
        num_tokens = sum(row["demonstration_tokens"] for row in shown)
        scores["demonstration_nll"] = float(sum(row["demonstration_nll"] for row in shown) / num_tokens)
        scores["n_demonstrations"] = float(len(shown))
    return _means_of_reported(played) | scores


def _means_of_reported(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each number that rows report, over the rows that have it."""
    reported: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.get("metrics", {}).items():
            reported.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in reported.items()}
