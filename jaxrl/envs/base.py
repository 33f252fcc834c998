"""What an environment is: a finite list of task specs and a way to play one.

An environment plays through a `Session`, which records every token of the rollout; it returns an `Outcome` and never
touches tokens itself. A reward is a finite number or None (not scored). Raising is allowed: `envs.play` turns it into a
`Failure` on the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.config.env import ExampleConfig
from jaxrl.errors import ConfigError
from jaxrl.types import ToolCall

Message = Mapping[str, Any]
"""One chat message as OpenAI's API has it: `role` and `content` (a text, or a list of text parts); an assistant's may have
`tool_calls` and `reasoning_content`, a tool's has `tool_call_id` and `name`."""

ToolSchema = Mapping[str, Any]
"""What a tool is called with, as OpenAI's API has it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

TaskSpec = dict[str, Any]
"""The JSON value of one task. Keys that the rest of the system reads: `id` (str, stable, unique in its list) and, where
there are any, `difficulty` and `group`. The rest belongs to the environment."""


Score = Callable[[TaskSpec, str], float | Awaitable[float | None] | None]
"""(spec, text of a reply) -> a finite number, or None if it cannot be scored; a coroutine function, or a plain one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One policy turn, as an environment sees it."""

    text: str
    """The decoded reply, without the stop id."""
    is_stopped: bool
    """False if the token limit cut the reply."""
    num_tokens: int
    """Tokens sampled in this turn."""
    content: str = ""
    """`text` without reasoning and calls of tools: what a user would be shown."""
    reasoning: str = ""
    """What the reply set apart as thinking; empty if nothing."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it asks for, malformed calls included."""
    num_prompt_tokens: int = 0
    """Tokens that the policy was shown before this turn."""
    has_unread_call: bool = False
    """True if it looks as if it called a tool in some format, but not in the one that is read."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment says when a rollout is over."""

    reward: float | None
    """None when the environment cannot score it."""
    stop_reason: str = "done"
    """Why the rollout ended, in the environment's words."""
    is_truncated: bool = False
    """True if a token or turn limit cut the rollout."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers to keep with the rollout."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else algorithms and logs are told; JSON-like."""
    turn_rewards: Sequence[float] | None = None
    """A finite reward for each reply of the policy, in the order in which they were given, those of other conversations of the rollout
    included; None if only the whole is rewarded. `reward` is not made of them: what is not scored as a whole says so."""


Demonstration = str | Sequence[str]
"""Reference replies as the policy should write them, one for each of its turns; a single text is one turn."""


class Session(Protocol):
    """One rollout's conversation with the policy.

    One `ask` at a time: what is to be said side by side is said in forks.
    """

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Append messages to the conversation and let the policy reply.

        Args:
          messages: what is new; not empty.
          tools: what the policy may call. They stand at the beginning of a conversation: other tools than before rewrite it.

        Raises:
          PromptTooLongError: the conversation leaves no room for a reply.
          JaxrlError: whatever the policy's endpoint raised.
        """
        ...

    def fork(self) -> Session:
        """Return a session that goes on from what was said so far, beside this one: what one says, the other does not see."""
        ...

    def restart(self) -> Session:
        """Return a session of the same rollout in which nothing was said yet: for a sub-agent, or after a summary."""
        ...


class Environment(Protocol):
    """A world to play in."""

    name: str

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs, in a stable order; not empty."""
        ...

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Play one task to its end. The spec is a copy: what is written into it reaches no other rollout."""
        ...

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return the environment's own reference replies to a task; None if there are none."""
        ...

    def close(self) -> None:
        """Give back what playing took, such as processes. May be called twice; nothing is played afterwards."""
        ...


def demonstrated_turns(demonstration: Demonstration | None) -> tuple[str, ...] | None:
    """Return the replies of a demonstration, one per turn; None for what is none.

    Example:
      >>> demonstrated_turns("11"), demonstrated_turns(["add 8 and 3", "11"]), demonstrated_turns(None), demonstrated_turns([])
      (('11',), ('add 8 and 3', '11'), None, None)
    """
    turns = (demonstration,) if isinstance(demonstration, str) else demonstration
    if isinstance(turns, Sequence) and len(turns) > 0 and all(isinstance(turn, str) for turn in turns):
        return tuple(turns)
    return None


def opening(system_prompt: str | None, examples: Sequence[ExampleConfig]) -> list[Message]:
    """Return what stands before a question: the system message, and each example as a question with its answer.

    Example:
      >>> opening("Be brief.", [ExampleConfig(question="1 + 1 =", answer="2")])[1:]
      [{'role': 'user', 'content': '1 + 1 ='}, {'role': 'assistant', 'content': '2'}]
    """
    messages: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for example in examples:
        messages += [{"role": "user", "content": example.question}, {"role": "assistant", "content": example.answer}]
    return messages


def checked_tasks(name: str, tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """Return the tasks of an environment.

    Args:
      name: the environment, for messages.
      tasks: what it is to play.

    Raises:
      ConfigError: no task, or two tasks with one id, or a task without one, or one that is no JSON.
    """
    # As text, as it is known by everywhere else: 1 and "1" are one id.
    ids = [None if spec.get("id") is None else str(spec["id"]) for spec in tasks]
    if not ids:
        raise ConfigError(f"env {name!r} has no tasks")
    for index, spec in enumerate(tasks):
        try:
            json.dumps(spec, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # better here than when the first checkpoint is written
            raise ConfigError(f"env {name!r}: task {index} ({ids[index]!r:.100}) is no JSON value: {error}") from error
    if None in ids or len(set(ids)) < len(ids):
        raise ConfigError(f"env {name!r}: every task needs an `id` of its own, got {len(set(ids) - {None})} ids for {len(ids)} tasks")
    return list(tasks)
