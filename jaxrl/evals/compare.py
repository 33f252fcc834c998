"""What changed between two evaluations of the same tasks: which ones are solved now, which ones no longer, and whether that can be chance.

In: two results, or their scores. Out: a `Comparison` of the tasks that both have, and lines that say it. A task counts as solved if at
least half of its scored episodes succeeded: with one episode per task, if that one did. A task without a scored episode on either
side is listed and is no change. Results of other tasks, or of tasks judged in another way, are refused. It plays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxrl.config.evals import EvalConfig
from jaxrl.errors import ConfigError

MUST_AGREE = ("split", "seeds", "limit", "samples_per_task", "success_threshold")
"""Parameters of an evaluation that say which episodes are played, and when one is a success; `dataset` beside them."""
MAX_LISTED = 20
"""Ids of one kind that `comparison_lines` lists."""


class Measured(Protocol):
    """What an evaluation found, as far as it is compared; `EvalResult` is one."""

    @property
    def config(self) -> EvalConfig:
        """What was asked."""
        ...

    @property
    def scores(self) -> Mapping[str, Any]:
        """What came of it; `per_task` has an entry for each task."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from one evaluation to another; every task is in exactly one of the seven counts."""

    fixed: tuple[str, ...]
    """Ids of the tasks that are solved now and were not before, in the order of the second result."""
    regressed: tuple[str, ...]
    """Ids of the tasks that were solved before and no longer are, in the order of the first result."""
    num_still_solved: int
    """Tasks that are solved in both."""
    num_still_unsolved: int
    """Tasks that are solved in neither."""
    errored: tuple[str, ...]
    """Ids of the tasks that have no scored episode in one of the two: neither fixed nor regressed."""
    only_in_before: tuple[str, ...]
    """Ids of the tasks that the second result does not have."""
    only_in_after: tuple[str, ...]
    """Ids of the tasks that the first result does not have."""
    p_value: float
    """Probability that fixed and regressed tasks are at least as unequal in number if either is as likely: McNemar's exact test,
    two-sided. For information: a test on few tasks has little power."""
    success_rate_difference: float | None
    """Mean over the compared tasks of the share of successes after minus before; None without any."""
    success_rate_difference_se: float | None
    """Its standard error, of pairs; None with fewer than two tasks."""
    remarks: tuple[str, ...] = ()
    """What else differs between the two, in words; differences that were overruled by `force` first."""

    @property
    def num_unchanged(self) -> int:
        """Compared tasks that are neither fixed nor regressed."""
        return self.num_still_solved + self.num_still_unsolved

    @property
    def num_compared(self) -> int:
        """Tasks with a scored episode in both."""
        return len(self.fixed) + len(self.regressed) + self.num_unchanged

    @property
    def is_regression(self) -> bool:
        """True if any task regressed, however likely that is by chance: what `--fail-on-regression` fails on."""
        return bool(self.regressed)

    def is_regression_below(self, p: float) -> bool:
        """True if the success rate fell, more tasks regressed than were fixed, and the p is below `p`: what `--regression-p` fails on.

        Example:
          >>> scores = [{"per_task": {str(i): {"success_rate": was} for i in range(6)}} for was in (1.0, 0.0)]
          >>> found = compare(*scores)
          >>> found.p_value, found.is_regression_below(0.05), found.is_regression_below(0.01)
          (0.03125, True, False)
        """
        fell = self.success_rate_difference is not None and self.success_rate_difference < 0
        return fell and len(self.regressed) > len(self.fixed) and self.p_value < p


def compare(before: Measured | Mapping[str, Any], after: Measured | Mapping[str, Any], *, force: bool = False) -> Comparison:
    """Compare two evaluations of the same tasks, task by task.

    Args:
      before: the earlier result, or its scores alone; of scores nobody can tell whether they are of the same evaluation.
      after: the later one.
      force: compare the tasks that both have although the two are not of the same evaluation, and say so in `remarks`.

    Raises:
      ConfigError: dataset, split, seeds, limit, samples per task or success threshold differ, or no task is in both, and `force` is
        not set; or the scores have no `per_task`.

    Example:
      >>> def scores(**shares):
      ...     return {"per_task": {task: {"success_rate": share} for task, share in shares.items()}}
      >>> found = compare(scores(a=0.0, b=1.0, c=1.0, d=None), scores(a=1.0, b=0.0, c=1.0, d=1.0))
      >>> found.fixed, found.regressed, found.num_still_solved, found.errored, found.p_value
      (('a',), ('b',), 1, ('d',), 1.0)
    """
    old, new = _success_shares(before, "the first result"), _success_shares(after, "the second result")
    both = [task for task in old if task in new]
    clashes = [] if both else [f"no task of the {len(old)} before is among the {len(new)} after"]
    if isinstance(before, Mapping) or isinstance(after, Mapping):
        others = ["scores without their configuration: nothing tells whether both are of the same evaluation"]
    else:
        clashes = _clashes(before.config, after.config) + clashes
        others = _other_differences(before.config, after.config)
    if clashes and not force:
        raise ConfigError(
            f"the two results are not of the same evaluation: {'; '.join(clashes)}; evaluate both alike, or force the comparison "
            "(`force=True`, `--force`), which takes the tasks that both have"
        )
    pairs = {task: (was, now) for task in both if (was := old[task]) is not None and (now := new[task]) is not None}
    fixed = tuple(task for task in new if task in pairs and not _is_solved(pairs[task][0]) and _is_solved(pairs[task][1]))
    regressed = tuple(task for task, (was, now) in pairs.items() if _is_solved(was) and not _is_solved(now))
    differences_N = np.asarray([now - was for was, now in pairs.values()], np.float64)
    return Comparison(
        fixed=fixed,
        regressed=regressed,
        num_still_solved=sum(_is_solved(was) and _is_solved(now) for was, now in pairs.values()),
        num_still_unsolved=sum(not _is_solved(was) and not _is_solved(now) for was, now in pairs.values()),
        errored=tuple(task for task in both if task not in pairs),
        only_in_before=tuple(task for task in old if task not in new),
        only_in_after=tuple(task for task in new if task not in old),
        p_value=mcnemar_p_value(len(fixed), len(regressed)),
        success_rate_difference=float(differences_N.mean()) if pairs else None,
        success_rate_difference_se=float(differences_N.std(ddof=1) / math.sqrt(len(pairs))) if len(pairs) > 1 else None,
        remarks=(*(f"compared all the same: {clash}" for clash in clashes), *others),
    )


def mcnemar_p_value(num_fixed: int, num_regressed: int) -> float:
    """Return the exact two-sided p of McNemar's test: a fair coin that is tossed once for each task that changed.

    McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages",
    https://doi.org/10.1007/BF02295996.

    Example:
      >>> mcnemar_p_value(0, 0), mcnemar_p_value(1, 0), mcnemar_p_value(6, 0), mcnemar_p_value(2, 6)
      (1.0, 1.0, 0.03125, 0.2890625)
    """
    num_changed, fewer = num_fixed + num_regressed, min(num_fixed, num_regressed)
    # As integers: a float of 2^n overflows from a thousand changes on. Each C(n, k) comes of the one before it, for the sake of large n.
    of_k, num_as_unequal = 1, 0
    for k in range(fewer + 1):
        num_as_unequal += of_k
        of_k = of_k * (num_changed - k) // (k + 1)
    return min(1.0, 2 * num_as_unequal / 2**num_changed)


def comparison_lines(comparison: Comparison, *, max_listed: int = MAX_LISTED) -> list[str]:
    """Say a comparison in plain lines, for a terminal or a file.

    Args:
      comparison: what to say.
      max_listed: ids of one kind that are listed; more are counted.

    Example:
      >>> scores = {"per_task": {"a": {"success_rate": 1.0}, "b": {"success_rate": 0.0}}}
      >>> comparison_lines(compare(scores, scores))[0]
      '2 tasks compared: 0 fixed, 0 regressed, 1 still solved, 1 still unsolved'
    """
    found = comparison
    num = found.num_compared
    lines = [
        f"{num} {'task' if num == 1 else 'tasks'} compared: {len(found.fixed)} fixed, {len(found.regressed)} regressed, "
        f"{found.num_still_solved} still solved, {found.num_still_unsolved} still unsolved"
    ]
    if found.success_rate_difference is not None:
        se = found.success_rate_difference_se
        spread = "" if se is None else f" (standard error {100 * se:.1f})"
        lines.append(f"success rate {100 * found.success_rate_difference:+.1f} points{spread}; exact McNemar p = {found.p_value:.3g}")
    for name, ids in (
        ("fixed", found.fixed),
        ("regressed", found.regressed),
        ("without a score on one side", found.errored),
        ("only before", found.only_in_before),
        ("only after", found.only_in_after),
    ):
        if ids:
            more = f" and {len(ids) - max_listed} more" if len(ids) > max_listed else ""
            lines.append(f"{name} ({len(ids)}): {', '.join(ids[:max_listed])}{more}")
    return [*lines, *(f"note: {remark}" for remark in found.remarks)]


def _is_solved(share: float) -> bool:
    return share >= 0.5


def _success_shares(result: Measured | Mapping[str, Any], which: str) -> dict[str, float | None]:
    """Return the share of successes of each task among its scored episodes; None without any."""
    scores = result if isinstance(result, Mapping) else result.scores
    per_task = scores.get("per_task")
    if not isinstance(per_task, Mapping) or not all(isinstance(entry, Mapping) for entry in per_task.values()):
        raise ConfigError(f"{which} has no scores by task (`per_task`), so nothing can be compared; score its rows again (`score_rows`)")
    return {str(task): entry.get("success_rate") for task, entry in per_task.items()}


def _clashes(before: EvalConfig, after: EvalConfig) -> list[str]:
    """Say what makes two results those of different evaluations."""
    old, new = before.eval_parameters, after.eval_parameters
    named = [("dataset", before.dataset, after.dataset), *((name, getattr(old, name), getattr(new, name)) for name in MUST_AGREE)]
    return _differing(named)


def _other_differences(before: EvalConfig, after: EvalConfig) -> list[str]:
    """Say what else differs and may be the reason for a change, besides who was measured."""
    old, new = before.eval_parameters, after.eval_parameters
    named = [(name, getattr(old, name), getattr(new, name)) for name in ("max_turns", "system_prompt")]
    named += _of_tables("sampling", old.sampling.model_dump(), new.sampling.model_dump())
    named += _of_tables("env_parameters", before.env_parameters, after.env_parameters)
    named.append(("harness_version", before.harness_version, after.harness_version))
    named += _of_tables("library_versions", before.library_versions, after.library_versions)
    return [f"differs too: {difference}" for difference in _differing(named)]


def _of_tables(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(f"{name}.{key}", before.get(key), after.get(key)) for key in dict.fromkeys((*before, *after))]


def _differing(named: Iterable[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name} {_shown(before)} before, {_shown(after)} after" for name, before, after in named if before != after]


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."
