"""What an environment is: a finite list of task specs and a way to play one.

An environment plays through a `Session`, which records every token of the rollout; it returns an `Outcome` and never
touches tokens itself. A reward is a finite number or None (not scored). Raising is allowed: `envs.play` turns it into a
`Failure` on the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.types import ToolCall

Message = Mapping[str, Any]
"""One chat message as OpenAI's API has it: `role` and `content` (a text, or a list of text parts); an assistant's may have
`tool_calls` and `reasoning_content`, a tool's has `tool_call_id` and `name`."""

ToolSchema = Mapping[str, Any]
"""What a tool is called with, as OpenAI's API has it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

TaskSpec = dict[str, Any]
"""The JSON value of one task. Keys that the rest of the system reads: `id` (str, stable, unique in its list) and, where
there are any, `difficulty` and `group`. The rest belongs to the environment."""


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
    """A finite reward for each policy turn, in order; None if only the whole is rewarded."""


class Session(Protocol):
    """One rollout's conversation with the policy."""

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Append messages to the conversation and let the policy reply.

        Args:
          messages: what is new; not empty.
          tools: what the policy may call. They stand at the beginning of a conversation: other tools than before rewrite it.

        Raises:
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
        """Play one task to its end."""
        ...

    def demonstration(self, spec: TaskSpec) -> str | None:
        """Return the environment's own reference reply to a task, as the policy should write it; None if there is none."""
        ...

    def close(self) -> None:
        """Give back what playing took, such as processes. May be called twice; nothing is played afterwards."""
        ...
