"""How credit is given and where rollouts come from: one config class per algorithm, told apart by `type`.

Beside its settings a class says, as class variables, what a configuration can be checked for without the algorithm
itself. Class defaults are the recommended settings: there is no preset layer above them.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from jaxrl.config.base import IMPORT_PATH, Section
from jaxrl.config.model import FrozenModelConfig

LossType = Literal["rl", "ce", "ref_kl"]
"""The loss component that an algorithm's action tokens feed."""

POLICY, DEMONSTRATIONS = "policy", "demonstrations"
"""The two sources of rollouts that are words; the third is a frozen model."""

DEFAULT_DEMO_KEY = "demonstration"
DEFAULT_HINT = "This is an example of an expert's response to the question below:\n<demonstration>\n{demonstration}\n</demonstration>"


def _source_tag(value: Any) -> str:
    return "word" if isinstance(value, str) else "model"


Source = Annotated[
    Annotated[Literal["policy", "demonstrations"], Tag("word")] | Annotated[FrozenModelConfig, Tag("model")], Discriminator(_source_tag)
]


class AlgorithmSamplingConfig(Section):
    """Where an algorithm's rollouts come from."""

    source: Source = "policy"
    """`policy`: the model that is trained; every algorithm but `sft` needs it. `demonstrations`: the environment's own reference
    replies, no model. Or a table that names a frozen model: `name`, `base_url`."""


class AlgorithmBase(Section):
    """What every algorithm has."""

    type: str
    """Tag of the algorithm; each algorithm fixes its own."""
    sampling: AlgorithmSamplingConfig = AlgorithmSamplingConfig()
    """Where rollouts come from."""

    action_loss_type: ClassVar[LossType] = "rl"
    """The loss component that the sampled tokens feed; the algorithm's own class says the same."""
    is_group_relative: ClassVar[bool] = False
    """True if a rollout's credit comes from comparing it with the rest of its group."""
    learns_from_observations: ClassVar[bool] = False
    """True if cross-entropy is also on what the environment says after the policy's first reply."""

    @property
    def needs_turn_rewards(self) -> bool:
        """True if credit comes from rewards of single turns."""
        return False

    @property
    def loss_types(self) -> tuple[LossType, ...]:
        """The loss components that the algorithm's tokens may feed."""
        return (self.action_loss_type, "ce") if self.learns_from_observations else (self.action_loss_type,)

    @property
    def samples_from_live_policy(self) -> bool:
        """True if the policy that is trained plays the rollouts."""
        return self.sampling.source == POLICY

    @property
    def samples_from_model(self) -> bool:
        """True if a model plays the rollouts, so that token sampling means something."""
        return self.sampling.source != DEMONSTRATIONS

    @property
    def frozen_models(self) -> dict[str, FrozenModelConfig]:
        """Every frozen model that is declared in this table, by key, such as `teacher` or `sampling.source`."""
        return dict(_frozen_models(self))

    @model_validator(mode="after")
    def _has_what_its_loss_needs(self) -> AlgorithmBase:
        if not self.samples_from_live_policy and self.action_loss_type != "ce":
            source = self.sampling.source
            shown = f"a frozen model ({source.name!r})" if isinstance(source, FrozenModelConfig) else repr(source)
            raise ValueError(
                f"`sampling.source` is {shown}, but `type`={self.type!r} feeds the {self.action_loss_type} loss, whose importance ratio "
                "needs the logprobs with which the live policy sampled its own tokens; use `source`='policy', or `type`='sft' to learn "
                "from what somebody else wrote"
            )
        return self


def _frozen_models(section: Section, path: str = "") -> Iterator[tuple[str, FrozenModelConfig]]:
    for name, value in section:
        if isinstance(value, FrozenModelConfig):
            yield path + name, value
        elif isinstance(value, Section):
            yield from _frozen_models(value, f"{path}{name}.")


class TokensPenaltyConfig(Section):
    """Cost of a rollout: the tokens that the policy wrote, and those that tools answered."""

    type: Literal["tokens"] = "tokens"
    """What a rollout costs: `tokens`, weighted by who wrote them, or `turns`."""
    completion_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of a token that the policy wrote."""
    tool_response_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of a token of a tool's result."""


class TurnsPenaltyConfig(Section):
    """Cost of a rollout: its policy turns."""

    type: Literal["turns"] = "turns"
    """What a rollout costs: `tokens`, weighted by who wrote them, or `turns`."""


LengthPenaltyConfig = Annotated[TokensPenaltyConfig | TurnsPenaltyConfig, Field(discriminator="type")]


class GroupMeanConfig(AlgorithmBase):
    """What the algorithms have that credit by the mean of a group."""

    length_penalty: LengthPenaltyConfig | None = None
    """Favour the cheaper among a group's best rollouts: such a one counts up to twice its reward, every other rollout
    what it got. Null favours none."""
    credit: Literal["rollout", "turn"] = "rollout"
    """What is compared within a group: `rollout`, the rewards of whole rollouts, or `turn`, those of single turns, which the
    environment must give: a turn is credited with what it and the later ones earned above the mean turn."""
    is_group_relative: ClassVar[bool] = True

    @property
    def needs_turn_rewards(self) -> bool:
        """True if credit comes from rewards of single turns."""
        return self.credit == "turn"

    @model_validator(mode="after")
    def _has_one_kind_of_credit(self) -> GroupMeanConfig:
        if self.credit == "turn" and self.length_penalty is not None:
            raise ValueError(
                "`length_penalty` multiplies the rewards of whole rollouts, which `credit`='turn' does not look at; leave it out, or use "
                "`credit`='rollout'"
            )
        return self


class GRPOConfig(GroupMeanConfig):
    """Group-relative policy optimisation: reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    """Which algorithm. `grpo`: a rollout's advantage is its reward minus the mean of its group."""


class RoleConfig(Section):
    """How much the messages of one role are learned from."""

    alpha: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of the cross-entropy of their tokens."""


class ToolRoleConfig(RoleConfig):
    """How much the results of tools are learned from, and of which."""

    tool_names: list[str] | None = Field(default=None, min_length=1)
    """Only the results of the tools of these names; null takes those of all, also results that name no tool."""


class EchoRolesConfig(Section):
    """The roles whose messages are learned from; one that is null is not."""

    system: RoleConfig | None = None
    """Messages of the system, such as a rule that is announced later."""
    user: RoleConfig | None = None
    """Messages of the user, such as a hint after an attempt."""
    assistant: RoleConfig | None = None
    """Replies that the environment itself wrote, never those of the policy."""
    tool: ToolRoleConfig | None = None
    """Results of tools."""

    @property
    def table(self) -> dict[str, RoleConfig]:
        """The roles that are learned from, with their settings."""
        return {name: role for name, role in self if role is not None}

    @model_validator(mode="after")
    def _has_a_role(self) -> EchoRolesConfig:
        if not self.table:
            raise ValueError(
                "`roles` is empty, so nothing that the environment says would be learned from; leave it out for `tool` alone, name a role, "
                "such as `roles.user.alpha`=0.1, or use `type`='grpo'"
            )
        return self


class EchoFilterConfig(Section):
    """A Python function `keep(rollout, **kwargs)` that takes tokens out of what is learned from.

    It returns one mask for each branch that is trained, a list of as many bools as the branch has tokens. False takes a
    token out; True adds none.
    """

    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:function`, importable from where the run is started; refused if `run.allow_import_paths` is false."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of every call."""


class EchoConfig(GroupMeanConfig):
    """ECHO: `grpo`, and cross-entropy on what the environment says after the policy's first reply."""

    type: Literal["echo"] = "echo"
    """Which algorithm. `echo`: `grpo`, and the policy also learns to predict what the environment says after its first reply."""
    roles: EchoRolesConfig | None = None
    """Whose messages are learned from, and how much; null is `tool` alone, at its default. Any role that is set replaces that."""
    filter: EchoFilterConfig | None = None
    """Function that takes tokens out of what is learned from; null takes none."""
    learns_from_observations: ClassVar[bool] = True

    @property
    def table(self) -> dict[str, RoleConfig]:
        """The roles that are learned from, with their settings."""
        return (self.roles or EchoRolesConfig(tool=ToolRoleConfig())).table


class MaxRLConfig(AlgorithmBase):
    """Maximum-likelihood reinforcement learning: reward minus the group's mean, divided by that mean."""

    type: Literal["max_rl"] = "max_rl"
    """Which algorithm. `max_rl`: a rollout's advantage is its reward minus the mean of its group, divided by that mean."""
    is_group_relative: ClassVar[bool] = True


class RLOOConfig(AlgorithmBase):
    """Leave-one-out: reward minus the mean of the group's other rollouts."""

    type: Literal["rloo"] = "rloo"
    """Which algorithm. `rloo`: a rollout's advantage is its reward minus the mean of the others of its group."""
    is_group_relative: ClassVar[bool] = True


class ReinforceConfig(AlgorithmBase):
    """REINFORCE: reward minus a running mean of the environment's earlier rewards; needs no group."""

    type: Literal["reinforce"] = "reinforce"
    """Which algorithm. `reinforce`: a rollout's advantage is its reward minus a running mean of those of earlier groups."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Share of the baseline that stays when a group is added to it."""


class RAEConfig(AlgorithmBase):
    """Role-conditioned advantage estimation: a running baseline for each agent of the environment; needs no group."""

    type: Literal["rae"] = "rae"
    """Which algorithm. `rae`: a rollout's advantage is its reward minus a running mean of its agent's earlier rewards."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Share of an agent's baseline that stays when a rollout is added to it."""


class OPDConfig(AlgorithmBase):
    """On-policy distillation: the policy plays, a frozen teacher says how likely it finds each token."""

    type: Literal["opd"] = "opd"
    """Which algorithm. `opd`: the policy plays, and each of its tokens moves towards what a frozen teacher says of it."""
    teacher: FrozenModelConfig
    """The frozen model to come closer to: `name`, `base_url`; of the policy's vocabulary. It is asked for logprobs, never for text."""
    action_loss_type: ClassVar[LossType] = "ref_kl"

    @field_validator("teacher", mode="before")
    @classmethod
    def _is_another_model(cls, teacher: Any) -> Any:
        if teacher == POLICY:
            raise ValueError(
                "`teacher`='policy': the policy cannot be its own teacher, since their divergence is 0; give a frozen model (a table with "
                "`name` and `base_url`), or use `type`='opsd', whose teacher is the policy with a demonstration before its eyes"
            )
        return teacher


class OPSDConfig(AlgorithmBase):
    """On-policy self-distillation: the teacher is the policy itself, shown a demonstration first."""

    type: Literal["opsd"] = "opsd"
    """Which algorithm. `opsd`: the policy plays, and each of its tokens moves towards what itself says of it after a demonstration."""
    demo_key: str = Field(default=DEFAULT_DEMO_KEY, min_length=1)
    """Where the demonstration is: a key of what the rollout's environment told (`info`), else of the task; for the default,
    else the environment's own reference reply."""
    template: str = DEFAULT_HINT
    """The system message that shows the demonstration to the teacher; `{demonstration}` stands for it."""
    action_loss_type: ClassVar[LossType] = "ref_kl"

    @field_validator("template")
    @classmethod
    def _shows_the_demonstration(cls, template: str) -> str:
        try:
            fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
        except ValueError as error:
            raise ValueError(f"`template` cannot be filled in ({error}); a brace that is meant as one is written twice") from None
        if any(field != ["demonstration", "", None] for field in fields):
            raise ValueError("`template` has another field than {demonstration}; a brace that is meant as one is written twice")
        if not fields:
            raise ValueError("`template` does not show the demonstration; write {demonstration} where it belongs")
        return template


class SFTConfig(AlgorithmBase):
    """Supervised fine-tuning: cross-entropy on every token that a frozen model, or the environment itself, answered."""

    type: Literal["sft"] = "sft"
    """Which algorithm. `sft`: cross-entropy on replies that a frozen model, or the environment itself, gives."""
    action_loss_type: ClassVar[LossType] = "ce"

    @model_validator(mode="after")
    def _learns_from_somebody_else(self) -> SFTConfig:
        if self.samples_from_live_policy:
            raise ValueError(
                "`sampling.source`='policy': `sft` learns from somebody else's replies, since cross-entropy on the policy's own tokens "
                "teaches nothing; use 'demonstrations', or a frozen model (a table with `name` and `base_url`)"
            )
        return self


AlgorithmConfig = Annotated[
    GRPOConfig | EchoConfig | MaxRLConfig | RLOOConfig | ReinforceConfig | RAEConfig | OPDConfig | OPSDConfig | SFTConfig,
    Field(discriminator="type"),
]


class CoefficientsConfig(Section):
    """How much each loss component of an environment's tokens counts, beside those of other environments.

    Folded into the weights of the tokens. The member counts that the components are divided by do not change, except by a
    coefficient of 0, which takes the tokens out of the component.
    """

    rl: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Coefficient of the policy gradient; 0 takes its tokens out."""
    ce: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Coefficient of the cross-entropy; 0 takes its tokens out."""
    ref_kl: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Coefficient of the divergence from a reference; 0 takes its tokens out."""
