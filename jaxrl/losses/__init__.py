"""The maths of learning, as pure functions of arrays: token scores, the three loss components and their total."""

from jaxrl.losses.metrics import MetricSums, finish_metrics, measured, merge_metrics
from jaxrl.losses.scores import TokenScores, has_context, token_scores
from jaxrl.losses.total import compute_loss, count_members, loss_and_sums

__all__ = [
    "MetricSums",
    "TokenScores",
    "compute_loss",
    "count_members",
    "finish_metrics",
    "has_context",
    "loss_and_sums",
    "measured",
    "merge_metrics",
    "token_scores",
]
