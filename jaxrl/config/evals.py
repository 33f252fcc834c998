"""When the policy is measured during training, and on what; and the parameters of one evaluation, wherever it is made.

That held-out questions are not trained on can be told only from the questions: `envs.build.require_disjoint_questions`.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from pydantic import Field, model_validator

from jaxrl import __version__
from jaxrl.config.base import Section
from jaxrl.config.dump import redact
from jaxrl.config.env import EnvBase, EnvConfig, SamplingConfig, env_name

UNUSED_IN_EVALUATION = ("algo", "coefficients", "ratio", "tasks", "truncated")
"""Settings of an environment that mean something in training only."""
_PACKAGES = {"reasoning_gym": "reasoning-gym", "tools": "reasoning-gym", "feedback": "reasoning-gym", "verifiers": "verifiers"}
"""By type of environment, the package that its tasks or scores are made by."""


class EvalSectionConfig(Section):
    """Evaluation in training. The base and the final policy are always evaluated when an environment is listed."""

    env: list[EnvConfig] = []
    """Held-out environments; their `algo`, `coefficients`, `ratio` and `tasks` are not used, and setting one is a warning."""
    every_n_steps: int | None = Field(default=None, ge=1)
    """Also evaluate after every n-th step; null evaluates the base and the final policy only."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks of each environment, the first ones in its order; null plays all of them."""
    seeds: list[int] | None = None
    """Each task is played once per seed, which the environment finds as `seed` in the spec; null leaves the specs as they are."""
    samples_per_task: int = Field(default=1, ge=1)
    """Rollouts of each task and seed; more than 1 needs a temperature above 0."""
    success_threshold: float = 1.0
    """A rollout whose reward reaches this counts as a success; an environment may have a `success_threshold` of its own."""
    demonstration_nll: bool = False
    """Also score the environments' own reference replies: their mean negative logprob per token under the policy."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Token sampling of every environment here that has none of its own; never touches training's."""

    @model_validator(mode="after")
    def _plans_are_sound(self) -> EvalSectionConfig:
        if self.seeds is not None and (not self.seeds or len(set(self.seeds)) < len(self.seeds)):
            raise ValueError(f"`seeds` needs at least one seed, each once, got {self.seeds}; leave it out to play each task once")
        for env in self.env:
            if self.samples_per_task > 1 and self.sampling_of(env).temperature == 0:
                raise ValueError(
                    f"`samples_per_task`={self.samples_per_task} at temperature 0 would play the same rollout of env {env_name(env)!r} "
                    "again and again; raise `sampling.temperature`, or play one sample"
                )
        return self

    def sampling_of(self, env: EnvBase) -> SamplingConfig:
        """Return the token sampling that an environment ends up with."""
        return env.sampling or self.sampling

    def success_threshold_of(self, env: EnvBase) -> float:
        """Return the reward from which on a rollout of an environment is a success."""
        return self.success_threshold if env.success_threshold is None else env.success_threshold


class EvalParameters(Section):
    """What is played in one evaluation, and how it is judged; a result that is to be compared has the same ones."""

    split: str | None = None
    """Which split of the environment's tasks, for the record: the environment was built with it."""
    limit: int | None = Field(default=None, ge=1)
    """Tasks, the first ones in the environment's order; null plays all of them."""
    seeds: tuple[int, ...] | None = None
    """Each task is played once per seed, which the environment finds as `seed` in the spec; null leaves the specs as they are."""
    samples_per_task: int = Field(default=1, ge=1)
    """Episodes of each task and seed."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Token sampling."""
    max_turns: int | None = Field(default=None, ge=1)
    """Replies of one episode, for the record: the environment was built with it."""
    success_threshold: float = 1.0
    """An episode whose reward reaches this is a success."""
    model: str = ""
    """Who is measured."""
    system_prompt: str | None = None
    """For the record: the environment was built with it."""

    @model_validator(mode="after")
    def _plan_is_sound(self) -> EvalParameters:
        if self.seeds is not None and (not self.seeds or len(set(self.seeds)) < len(self.seeds)):
            raise ValueError(f"`seeds` needs at least one seed, each once, got {list(self.seeds)}")
        if self.samples_per_task > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"`samples_per_task`={self.samples_per_task} at temperature 0 would play the same episode again and again; raise "
                "`temperature`, or play one sample"
            )
        return self


class EvalConfig(Section):
    """One evaluation: what was asked, by which version of what. The field names are those of OpenEnv's results."""

    harness_name: str = "jaxrl.EnvEvalHarness"
    """Which harness."""
    harness_version: str = __version__
    """Its version."""
    library_versions: dict[str, str] = {}
    """Versions of the packages that the result depends on."""
    dataset: str
    """The environment, such as `reasoning_gym:chain_sum`."""
    eval_parameters: EvalParameters = EvalParameters()
    """What is played, and how it is judged."""
    env_parameters: dict[str, Any] = {}
    """The environment's own settings."""


def settings_in_evaluation(env: EnvBase) -> dict[str, Any]:
    """Return what an evaluation depends on of an environment's settings, as JSON values without secrets: `EvalConfig.env_parameters`."""
    return redact(env.model_dump(mode="json", exclude_none=True, exclude=set(UNUSED_IN_EVALUATION)))


def library_versions(env: EnvBase) -> dict[str, str]:
    """Return the version of each package that an environment's tasks or scores are made by: `EvalConfig.library_versions`."""
    package = _PACKAGES.get(env.type)
    if package is None:
        return {}
    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {package: "not installed"}
