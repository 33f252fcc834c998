"""The nouns that both arms share: tasks, rollouts, samples, batches and reports. See `docs/glossary.md`."""

from jaxrl.types.policy import staleness_steps
from jaxrl.types.rollout import Boundary, Branch, Bucket, Failure, Group, Node, PackedSample, Rollout, Task, Training, Writer, filtered
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
    "Branch",
    "Bucket",
    "Failure",
    "Group",
    "Members",
    "MicroBatch",
    "Node",
    "PackedSample",
    "Rollout",
    "StepReport",
    "Task",
    "TrainBatch",
    "Training",
    "TrainingSample",
    "Writer",
    "component_members",
    "filtered",
    "staleness_steps",
]
