"""Which task next: the protocol of every task sampler, and the samplers."""

from jaxrl.tasks.base import TaskSampler
from jaxrl.tasks.build import build_task_sampler
from jaxrl.tasks.identity import task_id, task_of
from jaxrl.tasks.sequential import SequentialSampler
from jaxrl.tasks.uniform import UniformSampler

__all__ = ["SequentialSampler", "TaskSampler", "UniformSampler", "build_task_sampler", "task_id", "task_of"]
