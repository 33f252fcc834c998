"""Which task next: the protocol of every task sampler, the samplers, and the gates that let groups into a batch."""

from jaxrl.tasks.base import TaskSampler, TaskSpec
from jaxrl.tasks.build import build_task_sampler
from jaxrl.tasks.curriculum import CurriculumSampler
from jaxrl.tasks.finite import FiniteSampler, ScoredGroup
from jaxrl.tasks.gates import Gate, build_gates
from jaxrl.tasks.identity import task_id, task_of
from jaxrl.tasks.pools import Pool, PoolsSampler
from jaxrl.tasks.sequential import SequentialSampler
from jaxrl.tasks.signal import signal_of
from jaxrl.tasks.uniform import UniformSampler

__all__ = [
    "CurriculumSampler",
    "FiniteSampler",
    "Gate",
    "Pool",
    "PoolsSampler",
    "ScoredGroup",
    "SequentialSampler",
    "TaskSampler",
    "TaskSpec",
    "UniformSampler",
    "build_gates",
    "build_task_sampler",
    "signal_of",
    "task_id",
    "task_of",
]
