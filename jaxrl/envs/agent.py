"""An environment that is a program of the user's: it talks to the policy through OpenAI's API and says what that was worth.

In: an agent function, tasks from a JSONL file, a budget. Out: an `Environment`. Each rollout calls the function with a URL and a key of
its own; what is sent there is answered by the policy and recorded token by token. The program keeps its conversations, runs its tools
and gives the reward; nothing here reads what it says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxrl.config.env import AgentEnvConfig, env_name
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Demonstration, Outcome, Session, TaskSpec, checked_tasks
from jaxrl.envs.gateway.attending import Unheeded, attended
from jaxrl.envs.gateway.server import Gateway
from jaxrl.envs.gateway.talk import Talk
from jaxrl.envs.hooks import called, imported
from jaxrl.envs.rows import read_rows
from jaxrl.envs.splits import question_id
from jaxrl.errors import ConfigError, EnvError

EXAMPLE = '{"id": "1", "question": "2 + 2 ="}'
"""A row of a file of tasks, for messages."""

Worth = float | Mapping[str, Any] | Outcome | None
Agent = Callable[[TaskSpec, str, str], Worth | Awaitable[Worth]]
"""(spec, base URL, API key) -> the reward, None, an `Outcome`, or one as a dict."""


class AgentEnvironment:
    """Let an agent play.

    Args:
      name: name in metrics and logs.
      tasks: the task specs, each with an `id` of its own.
      agent: the program. A coroutine function runs in the event loop and must not block it; a plain one runs in a thread of its own.
      budget: when its requests are refused.
      deadline_s: how long a plain function is waited for, in seconds; a thread cannot be killed.
      clock: seconds.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        agent: Agent,
        *,
        budget: BudgetConfig | None = None,
        deadline_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._tasks = checked_tasks(name, tasks)
        self._agent = agent
        self._budget = budget or BudgetConfig()
        self._deadline_s = deadline_s
        self._clock = clock
        self._gateway = Gateway()
        self._unheeded = Unheeded(name, "agent")

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs in their order."""
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return None: nobody knows beforehand what the agent will ask."""
        del spec
        return None

    def close(self) -> None:
        """Stop the server. May be called twice."""
        self._gateway.close()

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Play one task to its end.

        Raises:
          Exception: what the policy failed with, whatever the agent made of it; else what the agent raised.
        """
        talk = Talk(session, self._budget, warn=self._unheeded, clock=self._clock)
        base_url, api_key = self._gateway.open(talk.answer)
        try:
            agent = await attended(self._call(spec, base_url, api_key), talk, name=f"agent of env {self.name!r}")
        finally:
            self._gateway.shut(api_key)
        return self._outcome(talk, agent)

    async def _call(self, spec: TaskSpec, base_url: str, api_key: str) -> Any:
        what = f"env {self.name!r}: what the agent returns"
        try:
            return await called(self._agent, spec, base_url, api_key, what=what, deadline_s=self._deadline_s, thread=f"agent {self.name}")
        except SystemExit as error:  # in a task of its own it would end the event loop
            raise EnvError(f"env {self.name!r}: the agent called for the end of the process: {error!r}") from error

    def _outcome(self, talk: Talk, agent: asyncio.Task[Any]) -> Outcome:
        if agent.cancelled():
            raise EnvError(f"env {self.name!r}: the agent was cancelled by what it awaited itself")
        if (error := agent.exception()) is not None:
            if talk.too_long is not None:
                raise talk.too_long from error
            if talk.limit is None:
                raise error
            return Outcome(None, stop_reason=talk.limit, is_truncated=True)
        value = agent.result()
        if not talk.told:
            raise EnvError(
                f"env {self.name!r}: the agent returned {value!r:.100} without one reply of the policy, so there is nothing to learn from; "
                "it must send its requests to the `base_url` that it is called with"
            )
        outcome = self._read(value)
        if talk.limit is None:
            return outcome
        return dataclasses.replace(outcome, stop_reason=talk.limit, is_truncated=True)

    def _read(self, value: Any) -> Outcome:
        """Return what an agent returned as an outcome; whether its reward is a number is seen by whoever plays."""
        if isinstance(value, Outcome):
            return value
        if not isinstance(value, Mapping):
            return Outcome(reward=value)
        known = [field.name for field in dataclasses.fields(Outcome)]
        if "reward" not in value or (unknown := [key for key in value if key not in known]):
            problem = f"has {unknown[0]!r}" if "reward" in value else "has no 'reward'"
            raise EnvError(f"env {self.name!r}: the agent returned a dict that {problem}; it may have {', '.join(map(repr, known))}")
        return Outcome(**value)


def agent_environment(config: AgentEnvConfig) -> AgentEnvironment:
    """Import the agent, read the tasks, and build the environment.

    Raises:
      ConfigError: the agent cannot be imported or called, the file cannot be read, or a row is no task.
    """
    name = env_name(config)
    where = f"env {name!r}: `import_path`={config.import_path!r}"
    agent = imported(config.import_path, where)
    try:
        inspect.signature(agent).bind({}, "", "", **config.kwargs)
    except TypeError as error:
        given = ", ".join(["spec", "base_url", "api_key", *(f"{key}=..." for key in config.kwargs)])
        raise ConfigError(f"{where} cannot be called as ({given}): {error}; see `kwargs`") from None
    return AgentEnvironment(
        name,
        _read_tasks(config, f"env {name!r}: `path`={config.path!r}"),
        functools.partial(agent, **config.kwargs),
        budget=config.budget,
        deadline_s=config.rollout_deadline_s,
    )


def _read_tasks(config: AgentEnvConfig, where: str) -> list[TaskSpec]:
    specs: list[TaskSpec] = []
    line_of_id: dict[str, int] = {}
    for number, _, spec in read_rows(config.path, where, EXAMPLE):
        spec.setdefault("id", question_id(json.dumps(spec, sort_keys=True)))
        if not isinstance(spec["id"], str) or not spec["id"]:
            raise ConfigError(f"{where}, line {number}: `id` must be a text that is not empty, got {spec['id']!r}")
        if (first := line_of_id.setdefault(spec["id"], number)) != number:
            raise ConfigError(f"{where}: lines {first} and {number} are one task, {spec['id']!r}; remove one, or give each its own `id`")
        specs.append(spec)
    if not specs:
        raise ConfigError(f"{where}: the file has no rows")
    return specs
