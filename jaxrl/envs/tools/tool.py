"""What a tool is: a name, a schema, and a coroutine function that answers a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl.envs.base import ToolSchema
from jaxrl.errors import EnvError


class ToolError(Exception):
    """A call cannot be answered; the message is for the policy, which may call again."""


class ToolFailedError(EnvError):
    """A tool hung, died or returned something absurd: no fault of the policy's."""

    def __init__(self, message: str, *, told: str, is_late: bool = False) -> None:
        super().__init__(message)
        self.told = told
        """What the policy is told, if it is."""
        self.is_late = is_late
        """True if the tool was not done at its deadline."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the policy may call."""

    name: str
    """What the policy calls it; unique in its environment."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Arguments that fit `parameters` -> the result, a text. A `ToolError`, or any other exception, is told to the policy; a
    `ToolFailedError` is a failure of the tool."""
    description: str = ""
    """What the policy is told of it."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments; see `arguments` for what of it is checked."""
    deadline_s: float | None = 10.0
    """A call that takes longer has failed; None if `call` ends by itself in time."""
    close: Callable[[], None] = lambda: None
    """Gives back what the tool holds."""

    @property
    def schema(self) -> ToolSchema:
        """The tool as OpenAI's API has it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
