"""From a `tasks` table to the task sampler of one environment.

In: the config, the environment's task specs, a seed, and what the run's groups are. Out: a `TaskSampler`. To add one, add its config class
to `jaxrl.config.tasks` and a case here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxrl.config.tasks import (
    CurriculumTasksConfig,
    PoolsTasksConfig,
    PythonTasksConfig,
    SequentialTasksConfig,
    TasksConfig,
    UniformTasksConfig,
)
from jaxrl.errors import ConfigError
from jaxrl.tasks.base import TaskSampler, TaskSpec
from jaxrl.tasks.curriculum import CurriculumSampler
from jaxrl.tasks.imported import python_sampler
from jaxrl.tasks.pools import Pool, PoolsSampler
from jaxrl.tasks.sequential import SequentialSampler
from jaxrl.tasks.uniform import UniformSampler


def build_task_sampler(
    config: TasksConfig, specs: Sequence[TaskSpec], rng_seed: int, *, group_size: int, success_threshold: float = 1.0
) -> TaskSampler:
    """Build the sampler that a config describes, over these tasks.

    Args:
      config: which sampler.
      specs: the environment's tasks; at least one, with distinct ids.
      rng_seed: seed of its draws, `>= 0`.
      group_size: rollouts of one task, `>= 1`.
      success_threshold: a rollout with at least this reward is a success.

    Raises:
      ConfigError: the task list is empty, two tasks have one id, the tasks are not what the sampler needs, or a sampler of the user's own
        is none.
    """
    try:
        return _built(config, specs, rng_seed, group_size, success_threshold)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"`tasks` of type {config.type!r}: {error}") from error


def _built(config: TasksConfig, specs: Sequence[TaskSpec], rng_seed: int, group_size: int, success_threshold: float) -> TaskSampler:
    match config:
        case SequentialTasksConfig():
            return SequentialSampler(specs)
        case UniformTasksConfig():
            return UniformSampler(specs, rng_seed)
        case CurriculumTasksConfig():
            return CurriculumSampler(
                specs,
                group_size,
                config.key,
                rng_seed,
                config.gamma,
                config.eps,
                success_threshold,
                config.signal,
                config.signal_tolerance,
            )
        case PoolsTasksConfig():
            pools = [Pool(pool.name, math.inf if pool.max_score is None else pool.max_score, pool.weight) for pool in config.pools]
            return PoolsSampler(specs, pools, rng_seed, config.unseen_weight, config.failing_weight)
        case PythonTasksConfig():
            return python_sampler(config, specs, rng_seed, {"group_size": group_size, "success_threshold": success_threshold})
    raise ConfigError(f"no task sampler is built from {type(config).__name__}; add a case to `jaxrl.tasks.build`")
