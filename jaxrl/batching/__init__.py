"""From groups to fixed shapes, in numpy: message graphs to samples, samples to static micro-batches."""

from jaxrl.batching.balance import partition
from jaxrl.batching.layout import first_fit_decreasing
from jaxrl.batching.packer import DEFAULT_ATTENTION_COST, pack
from jaxrl.batching.samples import rollout_to_samples, trainable_branches
from jaxrl.types import STREAM_FILL

__all__ = [
    "DEFAULT_ATTENTION_COST",
    "STREAM_FILL",
    "first_fit_decreasing",
    "pack",
    "partition",
    "rollout_to_samples",
    "trainable_branches",
]
