"""Which environments a run plays: one class per environment, told apart by `type`.

In: a table of the configuration. Out: the section of its type, here those of questions that jaxrl asks itself (`env_outside` has the
others, `env_base` what all of them have). An option exists only on the class where it means something. What only the environment itself
can judge, such as the parameters of a dataset, is checked where it is built (`envs.build`).
"""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxrl.config.base import IMPORT_PATH, Section
from jaxrl.config.env_base import EnvBase, ExampleConfig, SamplingConfig, env_name
from jaxrl.config.env_outside import AgentEnvConfig, OpenEnvConfig, PythonEnvConfig, VerifiersEnvConfig
from jaxrl.config.turns import BudgetConfig

__all__ = [
    "AgentEnvConfig",
    "EnvBase",
    "EnvConfig",
    "ExampleConfig",
    "FeedbackEnvConfig",
    "GymQuestionsConfig",
    "OpenEnvConfig",
    "PythonEnvConfig",
    "PythonToolConfig",
    "QuestionsEnvConfig",
    "ReasoningGymEnvConfig",
    "ReverseTextEnvConfig",
    "SamplingConfig",
    "TierConfig",
    "ToolsEnvConfig",
    "VerifiersEnvConfig",
    "env_name",
]

TOOL_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"
"""What OpenAI's API takes for the name of a tool."""


class TierConfig(Section):
    """One difficulty of a dataset."""

    name: str = Field(min_length=1)
    """Name of the tier; the task's `difficulty`."""
    parameters: dict[str, Any] = {}
    """Dataset parameters of this tier, over the environment's own."""


class GymQuestionsConfig(EnvBase):
    """Questions from one dataset of the `reasoning_gym` package, whatever is played with them."""

    dataset: str
    """Name of the dataset, such as `chain_sum`."""
    parameters: dict[str, Any] = {}
    """The dataset's own parameters, such as `min_terms`."""
    tiers: list[TierConfig] = []
    """Difficulties, each a variation of the parameters; empty makes one tier called `all`."""
    num_tasks: int = Field(default=1000, ge=1)
    """Items generated per tier, before equal questions are merged and the split is taken."""
    seed: int = Field(default=0, ge=0)
    """First item seed. Item i of a tier is generated from seed + i, so two environments need seeds further apart than
    `num_tasks`."""
    split: Literal["train", "heldout", "all"] = "train"
    """Which questions to keep, by a hash of the question text: `train` and `heldout` never share a text."""
    heldout_frac: float = Field(default=0.1, ge=0, lt=1)
    """Share of distinct question texts that belong to `heldout`."""
    scorer: Literal["exact_match", "dataset"] = "exact_match"
    """`exact_match` gives 1 for exactly the answer and else 0; `dataset` is the dataset's own scorer, which may give
    part credit. Note: some datasets' scorers evaluate the reply as an expression, so a policy may run code in the worker
    process in which they are called."""
    require_stop: bool = True
    """A reply that was cut by the token limit is worth 0 whatever it holds; the scorer `dataset` judges it all the same."""

    @model_validator(mode="after")
    def _has_one_scorer(self) -> GymQuestionsConfig:
        if self.reward is not None and self.scorer != "exact_match":
            raise ValueError(f"`reward` takes the place of `scorer`={self.scorer!r}; leave one of them out")
        return self


class ReasoningGymEnvConfig(GymQuestionsConfig):
    """Single-turn questions from one dataset of the `reasoning_gym` package."""

    has_one_turn: ClassVar[bool] = True

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""


class QuestionsEnvConfig(EnvBase):
    """Single-turn questions from files of yours, JSONL (one JSON object a line) or Parquet: in each row a question and its answer."""

    demonstration_setting: ClassVar[str | None] = "demonstration_key"
    has_one_turn: ClassVar[bool] = True

    type: Literal["questions"] = "questions"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    path: str = Field(min_length=1)
    """The file, relative to where the run is started: Parquet if its name ends in `.parquet` (`pip install 'jaxrl[parquet]'`), else JSONL.
    Several files by a pattern, such as `data/part-*.jsonl`, are read in the order of their names."""
    question_key: str = Field(default="question", min_length=1)
    """Key of the question, which is the user's message as it stands."""
    answer_key: str = Field(default="answer", min_length=1)
    """Key of the answer: text, or a number, which is taken as it is written. Under a `python` reward a row may have none."""
    demonstration_key: str = Field(default="demonstration", min_length=1)
    """Key of a reply to learn from, as the policy should write it; a row may have none. `answer` takes the answer itself. What
    stands under `demonstration`, if that is not the key, is left out."""
    id_key: str = Field(default="id", min_length=1)
    """Key of a name of the row that no other row has; a row without one is named by a hash of its question."""
    difficulty_key: str = Field(default="difficulty", min_length=1)
    """Key of the row's difficulty, text or a number, by which a curriculum and evaluation tell tasks apart; a row may have none."""
    group_key: str = Field(default="group", min_length=1)
    """Key of the family of tasks that the row belongs to, text or a number; a row may have none."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks, the first ones of the split in the order of the file; null takes all."""
    split: Literal["train", "heldout", "all"] = "train"
    """Which questions to keep, by a hash of the question text: `train` and `heldout` never share a text."""
    heldout_frac: float = Field(default=0.1, ge=0, lt=1)
    """Share of distinct question texts that belong to `heldout`."""
    require_stop: bool = True
    """A reply that was cut by the token limit is worth 0 whatever it holds."""


class ReverseTextEnvConfig(EnvBase):
    """Repeat a short text backwards: the smallest complete environment, to be copied."""

    has_one_turn: ClassVar[bool] = True

    type: Literal["reverse_text"] = "reverse_text"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    min_chars: int = Field(default=2, ge=1)
    """Shortest text."""
    max_chars: int = Field(default=5, ge=1)
    """Longest text."""
    alphabet: str = Field(default="abcdefghij", min_length=2)
    """Characters that texts are made of."""
    num_tasks: int = Field(default=1000, ge=1)
    """Texts generated."""
    seed: int = Field(default=0, ge=0)
    """Seed of the texts."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> ReverseTextEnvConfig:
        if self.min_chars > self.max_chars:
            raise ValueError(f"`min_chars`={self.min_chars} exceeds `max_chars`={self.max_chars}")
        return self


class PythonToolConfig(Section):
    """A Python function `tool(**arguments)` that returns a text, or a JSON value; it runs in a worker process that can be killed."""

    name: str = Field(pattern=TOOL_NAME)
    """What the policy calls it."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:function`; refused if `run.allow_import_paths` is false."""
    description: str = ""
    """What the policy is told; empty takes the function's docstring."""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments; empty makes one of the function's signature."""
    deadline_s: float = Field(default=10.0, gt=0, le=86400)
    """A call that runs longer is killed, and the tool has failed. Waiting for a free process does not count."""
    workers: int = Field(default=2, ge=1)
    """Worker processes that answer calls at the same time; each is started when a call finds the others busy."""
    env_vars: list[str] = []
    """Environment variables that the function may see though they look like secrets; its process gets no others that do."""


class ToolsEnvConfig(GymQuestionsConfig):
    """Questions of a `reasoning_gym` dataset that the policy may answer with the help of tools, in several turns."""

    speaks_as: ClassVar[str | None] = "tool"

    type: Literal["tools"] = "tools"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    budget: BudgetConfig = BudgetConfig()
    """When a conversation ends though the policy still calls tools; it is then worth 0, since nothing was answered."""
    calculator: bool = True
    """Offer a calculator, which evaluates an arithmetic expression."""
    calculator_name: str = Field(default="calculator", pattern=TOOL_NAME)
    """What the policy calls it; another name is for a model that knows it by that."""
    calculator_argument: str = Field(default="expression", pattern=TOOL_NAME)
    """Name of its one argument."""
    python: list[PythonToolConfig] = []
    """Tools of your own."""
    describe: bool = True
    """Tell the policy of its tools at the start of each conversation, as its chat template does it; false for a model that knows them."""
    max_result_chars: int = Field(default=4000, ge=1)
    """A longer result is cut for the policy, with a note of how much is missing."""
    on_failure: Literal["end", "answer"] = "end"
    """When a tool hangs, dies or returns something absurd: `end` ends the rollout without a reward, `answer` tells the policy."""
    demonstration_format: Literal["hermes", "llama3", "mistral", "xml"] = "hermes"
    """How demonstrations write a call of the calculator: in the policy's own format, which `model.tool_format` names."""

    @property
    def gives_turn_rewards(self) -> bool:
        """False: the answer alone is worth something."""
        return False

    @property
    def tool_names(self) -> list[str]:
        """Names of its tools."""
        return [self.calculator_name] * self.calculator + [tool.name for tool in self.python]

    @model_validator(mode="after")
    def _tools_have_names_of_their_own(self) -> ToolsEnvConfig:
        names = self.tool_names
        if not names:
            raise ValueError("`calculator`=false and no `python` tool leave nothing to call; use an environment of type 'reasoning_gym'")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools have the name {twice[0]!r}; give each its own `name`, or set `calculator`=false")
        return self


class FeedbackEnvConfig(GymQuestionsConfig):
    """Questions of a `reasoning_gym` dataset with several attempts, and a hint after each wrong one."""

    speaks_as: ClassVar[str | None] = "user"

    type: Literal["feedback"] = "feedback"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    budget: BudgetConfig = BudgetConfig(max_turns=3)
    """How many attempts there are (`max_turns`), and what else ends a conversation."""
    hint: str = Field(default="Wrong, try again.", min_length=1)
    """What a wrong attempt is answered with; `{attempt}` is its number, `{left}` how many are left, `{direction}` says of a
    number that it is too low or too high; it is empty where the right answer is no number."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Attempt k is worth `discount` to the power of k - 1 of what its answer is worth; the rollout is worth its last attempt."""
    turn_rewards: bool = False
    """Give each attempt its worth as the reward of its turn too, for algorithms that credit turns."""

    @property
    def gives_turn_rewards(self) -> bool:
        """True if it is set to."""
        return self.turn_rewards

    @model_validator(mode="after")
    def _hint_has_known_fields(self) -> FeedbackEnvConfig:
        try:
            fields = {name for _, name, _, _ in Formatter().parse(self.hint) if name is not None}
            if unknown := sorted(fields - {"attempt", "left", "direction"}):
                raise ValueError(f"there is no field {unknown[0]!r}, there are 'attempt', 'left' and 'direction'")
            self.hint.format(attempt=1, left=1, direction="")
        except (ValueError, LookupError) as error:
            raise ValueError(f"`hint`={self.hint!r} cannot be filled in: {error}; a brace that is meant as one is written twice") from None
        return self


EnvConfig = Annotated[
    ReasoningGymEnvConfig
    | QuestionsEnvConfig
    | ReverseTextEnvConfig
    | ToolsEnvConfig
    | FeedbackEnvConfig
    | PythonEnvConfig
    | AgentEnvConfig
    | OpenEnvConfig
    | VerifiersEnvConfig,
    Field(discriminator="type"),
]
