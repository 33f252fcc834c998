"""From a `tasks` table to the task sampler of one environment.

In: the config, the environment's task specs, a seed. Out: a `TaskSampler`. To add one, add its config class to
`jaxrl.config.env` and a case here.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.config.tasks import SequentialTasksConfig, TasksConfig, UniformTasksConfig
from jaxrl.errors import ConfigError
from jaxrl.tasks.base import TaskSampler, TaskSpec
from jaxrl.tasks.sequential import SequentialSampler
from jaxrl.tasks.uniform import UniformSampler


def build_task_sampler(config: TasksConfig, specs: Sequence[TaskSpec], rng_seed: int) -> TaskSampler:
    """Build the sampler that a config describes, over these tasks.

    Args:
      config: which sampler.
      specs: the environment's tasks; at least one, with distinct ids.
      rng_seed: seed of its draws, `>= 0`.

    Raises:
      ValueError: the task list is empty or two tasks have one id.
    """
    match config:
        case SequentialTasksConfig():
            return SequentialSampler(specs)
        case UniformTasksConfig():
            return UniformSampler(specs, rng_seed)
    raise ConfigError(f"no task sampler is built from {type(config).__name__}; add a case to `jaxrl.tasks.build`")
