"""Measuring the policy: the harness that plays held-out tasks, and the scores of its rows."""

from jaxrl.evals.harness import EnvEvalHarness, EvalResult
from jaxrl.evals.scores import score_rows

__all__ = ["EnvEvalHarness", "EvalResult", "score_rows"]
