"""What is played, how it is credited, and how far generation may run ahead of training.

Checked here: what environments, batch sizes and filters must be to each other; what one environment's settings must be
to each other, `config.rules` knows. What crosses to the engine or the trainer is checked in `config.run`.
"""

from __future__ import annotations

import warnings

from pydantic import Field, model_validator

from jaxrl.config.algorithm import AlgorithmConfig, GRPOConfig
from jaxrl.config.base import Section
from jaxrl.config.env import EnvBase, EnvConfig, SamplingConfig, env_name
from jaxrl.config.evals import EvalSectionConfig
from jaxrl.config.filters import FilterConfig, GibberishFilterConfig, RepetitionFilterConfig, ZeroAdvantageFilterConfig
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.rules import check_training_env, warn_of_default_split, warn_of_training, warn_of_unused


class TrainSectionConfig(Section):
    """The environments that are trained on."""

    env: list[EnvConfig] = []
    """At least one environment."""


class OrchestratorConfig(Section):
    """The asyncio arm of a run."""

    model: PolicyModelConfig
    """The policy."""
    algo: AlgorithmConfig = GRPOConfig()
    """The algorithm of every environment that has none of its own."""
    sampling: SamplingConfig = SamplingConfig()
    """Token sampling of every environment that has none of its own."""
    train: TrainSectionConfig
    """Environments to train on."""
    eval: EvalSectionConfig = EvalSectionConfig()
    """Environments to measure on."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task."""
    batch_size: int | None = Field(default=None, ge=1)
    """Rollouts per step; null with `token_batch_size` null means 128."""
    token_batch_size: int | None = Field(default=None, ge=1)
    """Or: tokens per step; groups are taken until their tokens reach it."""
    max_async_level: int | None = Field(default=None, ge=0)
    """Steps that generation may run ahead of training. Null means 0 (synchronous, exactly resumable) when the engine
    shares the trainer's devices, else 1."""
    max_staleness_steps: int = Field(default=8, ge=0)
    """A group whose oldest token is further behind than this when its step ships is dropped as stale."""
    max_inflight_groups: int | None = Field(default=None, ge=1)
    """Groups played at the same time; null means one step's worth."""
    pre_batch_filters: list[FilterConfig] = []
    """Filters before a batch is formed; what they drop is replaced by new groups."""
    post_batch_filters: list[FilterConfig] = [GibberishFilterConfig(), RepetitionFilterConfig(), ZeroAdvantageFilterConfig()]
    """Filters after a batch is formed; what they drop is not replaced, so the batch shrinks."""
    max_consecutive_failures: int = Field(default=256, ge=1)
    """The run stops after this many rollouts in a row failed, of the whole run or of one environment, with the last failure
    shown."""
    max_empty_batches: int = Field(default=10, ge=1)
    """The run stops after this many batch-equivalents in a row gave nothing to train on."""
    wait_deadline_s: float = Field(default=1800.0, gt=0)
    """Deadline of the orchestrator's own waits (a new policy version, the trainer's report, room for a batch)."""

    @model_validator(mode="after")
    def _is_consistent(self) -> OrchestratorConfig:
        if not self.train.env:
            raise ValueError("no training environment: add at least one `[[orchestrator.train.env]]` table")
        if self.batch_size is not None and self.token_batch_size is not None:
            raise ValueError(
                f"`orchestrator.batch_size`={self.batch_size} and `orchestrator.token_batch_size`={self.token_batch_size} "
                "are both set; set one"
            )
        size = self.rollouts_per_step
        if size is not None and size % self.group_size:
            nearest = max(self.group_size, round(size / self.group_size) * self.group_size)
            raise ValueError(
                f"`orchestrator.batch_size`={size} is not divisible by `orchestrator.group_size`={self.group_size}; "
                f"try {nearest}"
            )
        for slot, envs in (("train", self.train.env), ("eval", self.eval.env)):
            names = [env_name(env) for env in envs]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two `[[orchestrator.{slot}.env]]` tables are called {twice[0]!r}; give each its own `name`")
            if "all" in names:
                raise ValueError(f"`[[orchestrator.{slot}.env]]`: the name 'all' is reserved for aggregates")
        for slot, filters in (("pre_batch_filters", self.pre_batch_filters), ("post_batch_filters", self.post_batch_filters)):
            types = [f.type for f in filters]
            if len(set(types)) < len(types):
                raise ValueError(f"`orchestrator.{slot}` lists the same filter type twice: {types}")
        return self

    @model_validator(mode="after")
    def _environments_are_consistent(self) -> OrchestratorConfig:
        for index, env in enumerate(self.train.env):
            check_training_env(index, env, self.algo_of(env), self.sampling_of(env))
        warn_of_training([(env, self.algo_of(env), self.sampling_of(env)) for env in self.train.env], self.group_size)
        for index, env in enumerate(self.eval.env):
            warn_of_unused(index, env)
            warn_of_default_split(index, env)
        if self.algo != GRPOConfig() and all(env.algo is not None for env in self.train.env):
            warnings.warn("`orchestrator.algo` is not used: every training environment has an `algo` of its own", stacklevel=2)
        return self

    @property
    def rollouts_per_step(self) -> int | None:
        """Rollouts per step; None when steps are counted in tokens."""
        if self.token_batch_size is not None:
            return None
        return 128 if self.batch_size is None else self.batch_size

    def algo_of(self, env: EnvBase) -> AlgorithmConfig:
        """Return the algorithm that an environment ends up with."""
        return env.algo or self.algo

    def sampling_of(self, env: EnvBase) -> SamplingConfig:
        """Return the token sampling that a training environment ends up with."""
        return env.sampling or self.sampling
