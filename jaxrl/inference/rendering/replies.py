"""What a reply says: its visible text, its thinking, the tools that it calls.

A `ReplyParser` is told the sampled ids, never a whole conversation, so what a user quotes is nobody's call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxrl.types import ToolCall


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """One reply, taken apart."""

    content: str
    """What a user would be shown."""
    reasoning: str = ""
    """What was set apart as thinking; empty if nothing."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it asks for, malformed calls included, in order."""
    has_unread_call: bool = False
    """True if there is something like a call in it and nothing was read as one: tags spelt with ordinary tokens, or another format's."""


class ReplyParser(Protocol):
    """Takes replies apart, in the way of one model."""

    how: str
    """In which format calls are read and why in this one, for logs."""

    def parse(self, token_ids: np.ndarray, *, turn: int) -> ParsedReply:
        """Take a reply apart; nothing that a model writes makes it raise.

        Args:
          token_ids: [N] int32, what was sampled, without a final stop id.
          turn: 0-based turn of the conversation; the ids of calls begin with it.
        """
        ...
