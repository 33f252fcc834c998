"""The root of a run's configuration, and the checks that cross its sections.

Built by `jaxrl.config.load` from TOML and the command line, or directly in Python. Every cross-section check happens
here, before any device or socket is touched.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from jaxrl.config.base import Section
from jaxrl.config.env import env_name
from jaxrl.config.inference import EmbeddedInferenceConfig, InferenceConfig
from jaxrl.config.model import ClientConfig
from jaxrl.config.monitors import MonitorsConfig
from jaxrl.config.orchestrator import OrchestratorConfig
from jaxrl.config.rules import key_of
from jaxrl.config.schema import values_named
from jaxrl.config.trainer import CosineScheduleConfig, LinearScheduleConfig, TrainerConfig


class RunSection(Section):
    """What the run is called, where it writes, and how long it goes on."""

    name: str = Field(default="run", min_length=1, pattern=r"^[A-Za-z0-9_.\-]+$")
    """Name of the run, also of its folder."""
    output_dir: str | None = None
    """The run folder; null means `runs/<name>`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything that is random: task order, token sampling, initial weights."""
    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the whole run, resumed parts included."""
    compile_cache: bool = True
    """Keep compiled programs on disk, so that the next run of the same shapes starts without compiling them."""
    compile_cache_dir: str | None = None
    """Folder of the compiled programs; null means `jaxrl/xla` in the user's cache folder. Programs in it are run: keep it yours alone."""
    allow_import_paths: bool = True
    """False refuses every setting that names code, an `import_path`, a `taskset` or a `harness`: the setting for hosted use."""


class RunConfig(Section):
    """Everything that a run is."""

    run: RunSection = RunSection()
    """Name, folder, seed, length."""
    orchestrator: OrchestratorConfig
    """What is played and how it is credited."""
    inference: InferenceConfig = EmbeddedInferenceConfig()
    """Who generates text."""
    trainer: TrainerConfig = TrainerConfig()
    """What a step is."""
    monitors: MonitorsConfig = MonitorsConfig()
    """What is shown and written."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.run.output_dir) if self.run.output_dir else Path("runs") / self.run.name

    @property
    def engine(self) -> EmbeddedInferenceConfig:
        """The embedded engine's settings; a validated run has no other engine yet."""
        assert isinstance(self.inference, EmbeddedInferenceConfig)
        return self.inference

    @property
    def trainable_window(self) -> int:
        """Prompt plus reply tokens of a rollout that can be trained on whole: what the policy can hold and a row has room for."""
        return min(self.engine.max_model_len, self.trainer.row_length)

    @property
    def async_level(self) -> int:
        """Steps that generation may run ahead; by default 0, since the embedded engine shares the trainer's devices."""
        level = self.orchestrator.max_async_level
        return 0 if level is None else level

    @property
    def num_policy_versions(self) -> int:
        """Policy versions kept in memory: the one being served, and those that the trainer may publish before it is replaced."""
        return max(2, 1 + self.async_level)

    @model_validator(mode="before")
    @classmethod
    def _is_one_run(cls, table: Any) -> Any:
        if isinstance(table, dict) and isinstance(table.get("run"), list):
            raise ValueError("`run` is a list: a trainer trains one run; start a process for each, with a configuration of its own")
        return table

    @model_validator(mode="after")
    def _import_paths_are_allowed(self) -> Self:
        named = [pair for name in ("import_path", "taskset", "harness") for pair in values_named(name, self)]
        paths = [] if self.run.allow_import_paths else sorted(named)
        if paths:
            raise ValueError(
                "; ".join(f"`{key}`={path!r}" for key, path in paths) + " would run code that is no part of jaxrl, and "
                "`run.allow_import_paths`=false refuses every import path; leave it out, or run where it is allowed"
            )
        return self

    @model_validator(mode="after")
    def _policy_server_is_supported(self) -> Self:
        if self.inference.type == "openai":
            raise ValueError(
                "`inference.type`='openai' as the policy is not supported: new weights cannot yet be loaded into an external "
                "server, so it would go on sampling from the first policy; use `inference.type`='embedded'"
            )
        return self

    @model_validator(mode="after")
    def _model_settings_are_supported(self) -> Self:
        model = self.orchestrator.model
        if model.trust_remote_code:
            raise ValueError("`orchestrator.model.trust_remote_code`=true is not supported: code that ships with a tokenizer is never run")
        if model.client != ClientConfig():
            warnings.warn(
                "`orchestrator.model.client` is not used: it says how an external policy server is reached, and "
                "`inference.type`='embedded' has none; leave it out",
                stacklevel=2,
            )
        return self

    @model_validator(mode="after")
    def _window_fits_a_row(self) -> Self:
        for index, env in enumerate(self.orchestrator.train.env):
            max_tokens = self.orchestrator.sampling_of(env).max_tokens
            if max_tokens >= self.engine.max_model_len and self.orchestrator.algo_of(env).samples_from_model:
                raise ValueError(
                    f"`{key_of(index, env, 'sampling')}.max_tokens`={max_tokens} leaves no room for a prompt of env {env_name(env)!r} in "
                    f"`inference.max_model_len`={self.engine.max_model_len}; lower the first or raise the second"
                )
        if self.engine.max_model_len > self.trainer.row_length and self.trainer.overlong == "drop":
            warnings.warn(
                f"`inference.max_model_len`={self.engine.max_model_len} is longer than `trainer.row_length`="
                f"{self.trainer.row_length}: rollouts longer than a row will be dropped (`trainer.overlong`='drop')",
                stacklevel=2,
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Self:
        schedule, steps = self.trainer.optimizer.schedule, self.run.max_steps
        if isinstance(schedule, LinearScheduleConfig):
            if schedule.warmup_steps + schedule.decay_steps > steps:
                raise ValueError(
                    f"`trainer.optimizer.schedule`: warmup_steps={schedule.warmup_steps} + decay_steps={schedule.decay_steps} "
                    f"exceed `run.max_steps`={steps}"
                )
            if schedule.warmup_steps == 0 and schedule.decay_steps == 0:
                raise ValueError("`trainer.optimizer.schedule`: a linear schedule needs warmup_steps or decay_steps; use 'constant'")
        if isinstance(schedule, CosineScheduleConfig) and schedule.warmup_steps >= steps:
            raise ValueError(
                f"`trainer.optimizer.schedule.warmup_steps`={schedule.warmup_steps} must be below `run.max_steps`={steps}"
            )
        return self
