"""From an environment's configuration to what the pipeline asks: its task sampler and gates, its sampler and its algorithm.

In: a run's configuration, a built environment, the policy's pool. Out: a `TrainEnv`. Here it is decided who writes the replies. What
can be seen to fail without a device is refused before there is one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl.blame import failing_in
from jaxrl.config.algorithm import DEMONSTRATIONS, POLICY
from jaxrl.config.env import EnvBase, env_name
from jaxrl.config.model import FrozenModelConfig
from jaxrl.config.rules import key_of
from jaxrl.config.run import RunConfig
from jaxrl.envs.base import Environment
from jaxrl.errors import ConfigError
from jaxrl.inference.frozen import api_key
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import AlgorithmContext, build_algorithm
from jaxrl.orchestrator.connections import UnservedPolicy, probe
from jaxrl.orchestrator.sampler import Sampler, TrainEnv
from jaxrl.orchestrator.sources import DemonstrationSource, FrozenSource, LivePool, PolicySource, Source
from jaxrl.tasks import Gate, TaskSampler, build_gates, build_task_sampler


@dataclass(frozen=True, slots=True)
class EnvironmentBuilder:
    """Wires the training environments of one run."""

    config: RunConfig
    pool: LivePool
    """The policy."""
    renderer: Renderer
    """With the policy's tokenizer."""
    places: asyncio.Semaphore
    """Rollouts of the policy that may play at the same time, in all environments together."""

    def build(self, index: int, env_config: EnvBase, env: Environment) -> TrainEnv:
        """Return environment number `index`, wired; nothing is connected yet."""
        config, settings, name = self.config, self.config.orchestrator, env_name(env_config)
        with failing_in(f"environment {name!r}"):
            context = AlgorithmContext(
                env_name=name,
                renderer=self.renderer,
                window=config.engine.max_model_len,
                coefficients=env_config.coefficients,
                demonstration=env.demonstration,
            )
            tasks, gates = _tasks_and_gates(config, index, env_config, env)
            return TrainEnv(
                name=name,
                ratio=env_config.ratio,
                tasks=tasks,
                sampler=Sampler(env, self._source(env_config, env), env_config.rollout_deadline_s),
                algorithm=build_algorithm(settings.algo_of(env_config), self.pool, context),
                truncated=env_config.truncated,
                cost=env_config.tasks.cost,
                gates=gates,
            )

    def build_all(self, envs: Sequence[Environment]) -> list[TrainEnv]:
        """Return all environments of the run, wired, in the order of its configuration."""
        configured = zip(self.config.orchestrator.train.env, envs, strict=True)
        return [self.build(index, env_config, env) for index, (env_config, env) in enumerate(configured)]

    def _source(self, env_config: EnvBase, env: Environment) -> Source:
        config, sampling = self.config, self.config.orchestrator.sampling_of(env_config)
        longest, history = config.trainable_window, env_config.history
        match config.orchestrator.algo_of(env_config).sampling.source:
            case FrozenModelConfig() as model:
                return FrozenSource(model, self.renderer, sampling, run_seed=config.run.seed, window=longest, history=history)
            case word if word == DEMONSTRATIONS:
                return DemonstrationSource(self.renderer, env.demonstration, longest, history=history)
            case word:
                assert word == POLICY
                return PolicySource(
                    self.pool,
                    self.renderer,
                    sampling,
                    run_seed=config.run.seed,
                    window=config.engine.max_model_len,
                    places=self.places,
                    history=history,
                )


def check_tasks(config: RunConfig, train: Sequence[Environment]) -> None:
    """Refuse task samplers and gates that cannot be built, or not over the tasks that there are.

    Raises:
      ConfigError: names the environment and what is wrong with its `tasks`.
    """
    for index, (env_config, env) in enumerate(zip(config.orchestrator.train.env, train, strict=True)):
        with failing_in(f"environment {env_name(env_config)!r}"):
            _tasks_and_gates(config, index, env_config, env)


def _tasks_and_gates(config: RunConfig, index: int, env_config: EnvBase, env: Environment) -> tuple[TaskSampler, tuple[Gate, ...]]:
    """Return the task sampler and the gates of training environment number `index`, new ones each time."""
    threshold = 1.0 if env_config.success_threshold is None else env_config.success_threshold
    try:
        tasks = build_task_sampler(
            env_config.tasks,
            env.tasks(),
            rng_seed=config.run.seed + index,
            group_size=config.orchestrator.group_size,
            success_threshold=threshold,
        )
        return tasks, build_gates(env_config.tasks.gates)
    except ConfigError as error:
        raise ConfigError(f"env {env_name(env_config)!r}, `orchestrator.train.env.{index}.tasks`: {error}") from error


def check_sources(config: RunConfig, train: Sequence[Environment]) -> None:
    """Refuse environments whose replies nobody could write, as far as that shows without a device or a socket.

    Raises:
      ConfigError: an environment that is to demonstrate has no demonstration at all, or a model's key is not set.
    """
    for index, (env_config, env) in enumerate(zip(config.orchestrator.train.env, train, strict=True)):
        algo = config.orchestrator.algo_of(env_config)
        if algo.sampling.source == DEMONSTRATIONS and all(env.demonstration(spec) is None for spec in env.tasks()):
            setting = env_config.demonstration_setting
            remedy = "an environment that knows its answers"
            if setting is not None:
                held = ", ".join(repr(key) for key in dict.fromkeys(key for spec in env.tasks() for key in spec))
                key = f"`orchestrator.train.env.{index}.{setting}`={getattr(env_config, setting)!r}"
                remedy = f"name in {key} the column that holds it: there are {held}"
            raise ConfigError(
                f"`{key_of(index, env_config, 'algo')}.sampling.source`='demonstrations', but none of the {len(env.tasks())} tasks of env "
                f"{env_name(env_config)!r} has a demonstration; use a frozen model as `source`, or {remedy}"
            )
        for key, model in algo.frozen_models.items():
            api_key(model.api_key_var, os.environ, f"{key_of(index, env_config, 'algo')}.{key}.api_key_var")


async def probe_environments(config: RunConfig, renderer: Renderer, train: Sequence[Environment]) -> None:
    """Find, before there is a device, what setting the environments up would find after compiling and no waiting can mend.

    Such are a frozen model that is not served under its name, refuses the key or has too short a window, a chat template that an algorithm
    cannot use, and an algorithm that nobody registered.

    Raises:
      JaxrlError: as set-up would.
    """
    await probe(EnvironmentBuilder(config, UnservedPolicy(), renderer, asyncio.Semaphore(1)).build_all(train))
