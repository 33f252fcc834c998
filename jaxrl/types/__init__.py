"""The nouns that both arms share: tasks, rollouts, samples, batches and reports. See `docs/glossary.md`."""

from jaxrl.types.policy import staleness_steps
from jaxrl.types.rollout import Boundary, Bucket, Failure, Group, Node, Rollout, Task, filtered
from jaxrl.types.sample import (
    COMPONENTS,
    OPTIONAL_STREAMS,
    STREAM_FILL,
    Members,
    MicroBatch,
    StepReport,
    TrainBatch,
    TrainingSample,
    component_members,
)

__all__ = [
    "COMPONENTS",
    "OPTIONAL_STREAMS",
    "STREAM_FILL",
    "Boundary",
    "Bucket",
    "Failure",
    "Group",
    "Members",
    "MicroBatch",
    "Node",
    "Rollout",
    "StepReport",
    "Task",
    "TrainBatch",
    "TrainingSample",
    "component_members",
    "filtered",
    "staleness_steps",
]
