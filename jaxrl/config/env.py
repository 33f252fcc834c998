"""Which environments a run plays, how tokens are sampled in them, and how their tasks are picked.

One class per environment, told apart by `type`; an option exists only on the class where it means something. What only
the environment itself can judge, such as the parameters of a dataset, is checked where it is built (`envs.build`).
"""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxrl.config.algorithm import AlgorithmConfig, CoefficientsConfig
from jaxrl.config.base import IMPORT_PATH, Section
from jaxrl.config.reward import RewardConfig
from jaxrl.config.tasks import TasksConfig, UniformTasksConfig
from jaxrl.config.turns import BudgetConfig, History, Truncated

TOOL_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"
"""What OpenAI's API takes for the name of a tool."""
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


class PythonEnvConfig(EnvBase):
    """An environment of your own: a class or function that is called with `name` and `kwargs` and returns one."""

    type: Literal["python"] = "python"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:name`, importable from where the run is started; refused if `run.allow_import_paths` is false."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the call."""
    budget: BudgetConfig = BudgetConfig()
    """When a conversation of a `ChatEnvironment` ends though that would go on."""


class AgentEnvConfig(EnvBase):
    """An agent of your own, a program that talks to the policy through OpenAI's API and says what that was worth."""

    type: Literal["agent"] = "agent"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    import_path: str = Field(pattern=IMPORT_PATH)
    """`package.module:function`, importable from where the run is started; refused if `run.allow_import_paths` is false. It is called as
    `function(spec, base_url, api_key, **kwargs)` and returns a reward, None, or an `Outcome`, which may be a dict."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call."""
    path: str = Field(min_length=1)
    """The tasks: one JSON object a line (JSONL), relative to where the run is started. Each may have an `id` that no other has."""
    budget: BudgetConfig = BudgetConfig(max_turns=64)
    """When the agent's requests are refused, whatever conversation of the rollout they belong to."""

    @model_validator(mode="after")
    def _agent_words_its_own_prompts(self) -> AgentEnvConfig:
        for name in ("system_prompt", "examples"):
            if getattr(self, name):
                raise ValueError(f"`{name}` has no place in an environment of type 'agent', which words its own prompts; leave it out")
        return self


class OpenEnvConfig(EnvBase):
    """An environment behind an OpenEnv server, whose tasks it lists (Task API) and whose episodes it plays over a WebSocket."""

    type: Literal["openenv"] = "openenv"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    base_url: str = Field(pattern=r"^(https?|wss?)://")
    """The server, such as `http://127.0.0.1:8000`."""
    server_env: str | None = None
    """Which environment of the server; null takes the only one that it lists."""
    split: str = "train"
    """Which of the server's splits."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks of the split, the first ones; null takes all of them. A server that lists none needs a number: its tasks are as many seeds,
    from the first of `seeds` on."""
    seeds: list[int] = Field(default=[0], min_length=1)
    """Each task is played under each of these seeds; all rollouts of a group have the same one."""
    question_key: str = "question"
    """Field of the observation that is the user's message; an empty text shows the whole observation as JSON."""
    action: dict[str, Any] = {"answer": "{reply}"}
    """The fields of an action; `{reply}` in a text stands for the policy's reply, without what it set apart as thinking."""
    import_path: str | None = Field(default=None, pattern=IMPORT_PATH)
    """`package.module:name` of an object of your own with `message(observation, spec)` and `action(reply, spec)`, in place of
    `question_key` and `action`; refused if `run.allow_import_paths` is false."""
    reward_of: Literal["last", "sum"] = "last"
    """What a rollout is worth: the last reward of its steps that is not null, or the sum of all; without any it has none."""
    cost_key: str = "service_spend"
    """Number in the metadata of observations that is summed up and kept as a metric of that name, for `tasks.cost`."""
    budget: BudgetConfig = BudgetConfig()
    """When a conversation ends though the environment goes on."""
    max_sessions: int | None = Field(default=None, ge=1)
    """Sessions at the same time; null opens as many as are wanted and waits where the server has no room."""
    capacity_deadline_s: float = Field(default=300.0, gt=0)
    """How long a rollout may wait for its session; meanwhile the clock of `rollout_deadline_s` stands still."""
    request_deadline_s: float = Field(default=60.0, gt=0)
    """How long the server may take to answer one request."""

    @model_validator(mode="after")
    def _seeds_are_different(self) -> OpenEnvConfig:
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"`seeds` must be 0 or above, each once, got {self.seeds}")
        return self

    @model_validator(mode="after")
    def _replies_reach_the_server(self) -> OpenEnvConfig:
        if self.import_path is None and not _holds_reply(self.action):
            raise ValueError(f"`action`={self.action!r} has no '{{reply}}' in a text, so no reply would ever reach the server; put it into one")
        return self


def _holds_reply(template: Any) -> bool:
    """Say whether a template has a place for the reply, which is in texts and not in the names of fields."""
    if isinstance(template, dict | list):
        return any(_holds_reply(value) for value in (template.values() if isinstance(template, dict) else template))
    return isinstance(template, str) and "{reply}" in template


class VerifiersEnvConfig(EnvBase):
    """A taskset of the `verifiers` package, played by one of its harnesses as it is; the policy answers behind a local OpenAI API."""

    type: Literal["verifiers"] = "verifiers"
    """Which environment: `reasoning_gym`, `questions`, `reverse_text`, `tools`, `feedback`, `python`, `agent`, `openenv` or `verifiers`."""
    taskset: str = Field(min_length=1)
    """The taskset, as verifiers names it: an installed package or a module, importable from where the run is started, or one of its own;
    refused if `run.allow_import_paths` is false."""
    taskset_args: dict[str, Any] = {}
    """The taskset's own settings."""
    harness: str | None = Field(default=None, min_length=1)
    """The harness, named like a taskset; null takes the one that the taskset brings, else verifiers' chat loop, whose name is `null` too
    and which needs the program `uv`. Refused if `run.allow_import_paths` is false."""
    harness_args: dict[str, Any] = {}
    """The harness's own settings."""
    runtime: dict[str, Any] = {"type": "subprocess"}
    """Where the harness's programs run; verifiers' own default is a sandbox that is rented."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks, the first ones; null takes all of them, and a taskset without an end needs a number."""
    budget: BudgetConfig = BudgetConfig(max_turns=64)
    """When the harness's requests are refused; what it had done by then is scored."""
    max_sessions: int | None = Field(default=None, ge=1)
    """Rollouts at the same time, others wait for their turn; null plays all that are wanted, which may be many programs."""
    capacity_deadline_s: float = Field(default=3600.0, gt=0)
    """How long a rollout waits for its turn; this is no part of its `rollout_deadline_s`."""
    load_deadline_s: float = Field(default=600.0, gt=0)
    """How long the taskset may take to load, whatever it fetches meanwhile."""

    @property
    def gives_turn_rewards(self) -> bool:
        """False: verifiers rewards whole rollouts."""
        return False

    @model_validator(mode="after")
    def _taskset_words_its_own_prompts(self) -> VerifiersEnvConfig:
        for name in ("system_prompt", "examples"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` has no place in an environment of type 'verifiers', whose taskset words the prompts; leave it out"
                )
        for name in ("taskset", "harness"):
            if "id" in getattr(self, f"{name}_args"):
                raise ValueError(f"`{name}_args` holds an `id`; set `{name}`")
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


def env_name(config: EnvBase) -> str:
    """Return the name of an environment: the one it was given, or its dataset's, or its type's."""
    return config.name or getattr(config, "dataset", None) or config.type
