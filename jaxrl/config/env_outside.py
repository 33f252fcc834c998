"""Environments that are somebody else's program: a user's class, function or agent, an OpenEnv server, a taskset of verifiers.

In: a table of the configuration. Out: a section for each type. Whether the program is there and can be used is found out where the
environment is built (`envs.build`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from jaxrl.config.base import IMPORT_PATH
from jaxrl.config.env_base import EnvBase
from jaxrl.config.turns import BudgetConfig


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
            raise ValueError(
                f"`action`={self.action!r} has no '{{reply}}' in a text, so no reply would ever reach the server; put it into one"
            )
        return self


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


def _holds_reply(template: Any) -> bool:
    """Say whether a template has a place for the reply, which is in texts and not in the names of fields."""
    if isinstance(template, dict | list):
        return any(_holds_reply(value) for value in (template.values() if isinstance(template, dict) else template))
    return isinstance(template, str) and "{reply}" in template
