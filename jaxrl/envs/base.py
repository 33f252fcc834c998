"""What an environment is: a finite list of task specs and a way to play one.

An environment plays through a `Session`, which records every token of the rollout; it returns an `Outcome` and never
touches tokens itself. A reward is a finite number or None (not scored). Raising is allowed: `envs.play` turns it into a
`Failure` on the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`."""

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


class Session(Protocol):
    """One rollout's conversation with the policy."""

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Append messages to the conversation and let the policy reply.

        Raises:
          JaxrlError: whatever the policy's endpoint raised.
        """
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
