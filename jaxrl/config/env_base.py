"""What every environment has, whatever its type: how tokens are sampled in it, how its tasks are picked, what scores a reply.

In: a table of the configuration. Out: the base of the sections of `config.env`. What a single type has, its own section says.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from jaxrl.config.algorithm import AlgorithmConfig, CoefficientsConfig
from jaxrl.config.base import Section
from jaxrl.config.reward import RewardConfig
from jaxrl.config.tasks import TasksConfig, UniformTasksConfig
from jaxrl.config.turns import History, Truncated

LEAST_TEMPERATURE = 1e-5
"""The engine refuses any below it but 0."""


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy; above 0 where the policy's tokens are trained on."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; must stay 1 where the policy's tokens are trained on."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens, 0 keeps all; must stay 0 where the policy's tokens are trained on."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the likeliest; must stay 0 where the policy's tokens are trained
    on."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens of one reply at most; clamped to what is left of the window."""
    stop: list[str] = []
    """Strings that end a reply besides the model's stop ids."""

    @model_validator(mode="after")
    def _temperature_is_not_near_zero(self) -> SamplingConfig:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"`temperature`={self.temperature:g} is so low that logits divided by it overflow; use 0 for the likeliest token, or at "
                f"least {LEAST_TEMPERATURE:g}"
            )
        return self

    @model_validator(mode="after")
    def _stop_strings_are_not_empty(self) -> SamplingConfig:
        if "" in self.stop:
            raise ValueError("`stop` holds an empty string, which would end every reply at its first token; leave it out")
        return self


class ExampleConfig(Section):
    """A question with its answer, shown to the policy as two turns of the conversation."""

    question: str = Field(min_length=1)
    """The user's message, worded as the environment words its questions."""
    answer: str = Field(min_length=1)
    """The assistant's reply to it."""


class EnvBase(Section):
    """What every environment has, whatever its type."""

    demonstration_setting: ClassVar[str | None] = None
    """Name of the setting that says where in a task its demonstration is, if there is one."""
    has_one_turn: ClassVar[bool] = False
    """True if every rollout ends with the first reply."""
    speaks_as: ClassVar[str | None] = None
    """The role of whatever it says after the first reply; None if that is not known here."""

    type: str
    """Tag of the environment; each environment fixes its own."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[A-Za-z0-9_.\-]+$")
    """Name in metrics and logs; null takes the environment's own default. Unique among the training environments, and
    among those of evaluation."""
    system_prompt: str | None = None
    """A system message before the question; null sends none."""
    examples: list[ExampleConfig] = []
    """Turns between the system message and the question; a task that asks an example's question is left out."""
    ratio: float = Field(default=1.0, gt=0)
    """Share of groups drawn from this environment, relative to the others' ratios."""
    rollout_deadline_s: float = Field(default=300.0, gt=0)
    """A rollout still running after this many seconds is an error (`timeout`), not a reward of 0."""
    history: History = "template"
    """What a later turn makes of earlier ones: `template` follows the chat template and forks a branch where that rewrites them, `keep`
    continues the very tokens that the model saw."""
    truncated: Truncated = "train"
    """Rollouts that a limit cut short: `train`, `mask` (they count in the baseline and none of their sampled tokens is trained) or
    `drop` (left out of the group)."""
    reward: RewardConfig | None = None
    """What scores a reply in place of the environment's own scorer; null keeps that one."""
    reward_deadline_s: float = Field(default=30.0, gt=0, le=86400)
    """A scorer that runs in a worker process is killed after this many seconds; the reward is then missing, not 0. Waiting for a
    free process does not count."""
    reward_workers: int = Field(default=2, ge=1)
    """Worker processes that score replies at the same time; each is started when a reply finds the others busy."""
    algo: AlgorithmConfig | None = None
    """This environment's algorithm; null inherits `orchestrator.algo` whole."""
    coefficients: CoefficientsConfig = CoefficientsConfig()
    """How much each loss component of this environment counts beside those of the others."""
    sampling: SamplingConfig | None = None
    """This environment's token sampling; null inherits `orchestrator.sampling`."""
    tasks: TasksConfig = UniformTasksConfig()
    """How this environment's next task is picked, and which groups are let into a batch."""
    success_threshold: float | None = None
    """A rollout whose reward reaches this is a success, for a curriculum and in evaluation; null means 1 in training and
    `orchestrator.eval.success_threshold` in evaluation."""

    @property
    def gives_turn_rewards(self) -> bool:
        """False if it is known to give no reward for each turn."""
        return not self.has_one_turn

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools that it is known to have."""
        return []


def env_name(config: EnvBase) -> str:
    """Return the name of an environment: the one it was given, or its dataset's, or its type's."""
    return config.name or getattr(config, "dataset", None) or config.type
