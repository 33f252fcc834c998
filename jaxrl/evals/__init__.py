"""Measuring a policy: the harness that plays an environment's tasks, and the scores of its rows."""

from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.evals.demonstrations import DemonstrationScorer
from jaxrl.evals.harness import EnvEvalHarness
from jaxrl.evals.policy import EvalPolicy, LivePolicy
from jaxrl.evals.result import EvalResult
from jaxrl.evals.scores import flat_scores, score_rows

__all__ = [
    "DemonstrationScorer",
    "EnvEvalHarness",
    "EvalConfig",
    "EvalParameters",
    "EvalPolicy",
    "EvalResult",
    "LivePolicy",
    "flat_scores",
    "score_rows",
]
