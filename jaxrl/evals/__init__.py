"""Measuring a policy: the harness that plays an environment's tasks, the scores of its rows, when to measure, and what changed."""

from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.evals.compare import Comparison, compare, comparison_lines
from jaxrl.evals.demonstrations import DemonstrationScorer
from jaxrl.evals.functions import BatchFunctionPolicy, FunctionPolicy
from jaxrl.evals.harness import EnvEvalHarness
from jaxrl.evals.policy import EvalPolicy, LivePolicy
from jaxrl.evals.result import EvalResult
from jaxrl.evals.schedule import EvalSchedule
from jaxrl.evals.scores import flat_scores, score_rows
from jaxrl.evals.served import ServedPolicy

__all__ = [
    "BatchFunctionPolicy",
    "Comparison",
    "DemonstrationScorer",
    "EnvEvalHarness",
    "EvalConfig",
    "EvalParameters",
    "EvalPolicy",
    "EvalResult",
    "EvalSchedule",
    "FunctionPolicy",
    "LivePolicy",
    "ServedPolicy",
    "compare",
    "comparison_lines",
    "flat_scores",
    "score_rows",
]
