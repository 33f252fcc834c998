"""One turn of a conversation in tokens: the prompt that asks for a reply, and what the model has seen once it is given.

Values only, made by `rendering.Renderer`, and never changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.inference.rendering.tool_calls.base import turn_of


@dataclass(frozen=True, slots=True)
class RenderState:
    """A conversation as the model saw it, up to and including the policy's last reply."""

    messages: tuple[dict[str, Any], ...]
    """The replies of the policy have their whole text as `content`, thinking and calls of tools included."""
    tools: tuple[dict[str, Any], ...]
    """The schemas that the model was shown."""
    replies: Mapping[int, ParsedReply]
    """The policy's replies, taken apart, by their index in `messages`."""
    text: str
    """The text of `token_ids`, without that of a final stop id."""
    stop_text: str
    """The text of the stop id that ended the reply; empty if none did."""
    template_text: str | None
    """How the chat template writes the conversation up to this reply; None if the model saw what the template would not write."""
    token_ids: np.ndarray
    """[n] int32."""
    num_sampled: int = 0
    """How many of them, at the end, are the policy's last reply, a stop id included."""

    @property
    def reply(self) -> ParsedReply:
        """The last reply, taken apart."""
        return self.replies[len(self.messages) - 1]


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """One prompt for the policy."""

    messages: tuple[dict[str, Any], ...]
    """The whole conversation."""
    tools: tuple[dict[str, Any], ...]
    """The schemas of the tools that the policy may call."""
    replies: Mapping[int, ParsedReply]
    """The policy's earlier replies, taken apart, by their index in `messages`."""
    text: str
    """The text of `prompt_ids`."""
    template_text: str | None
    """How the chat template writes the conversation; None if the prompt is not what the template would write."""
    prompt_ids: np.ndarray
    """[P] int32, the ids to send: those before this turn (unless it is a fork), the spans, the generation prompt."""
    spans: tuple[np.ndarray, ...]
    """One [n] int32 per message that this turn adds; on a fork, per message of the whole conversation. The scaffolding
    that closes the turn before belongs to the first of them."""
    content_masks: tuple[np.ndarray | None, ...]
    """One [n] bool per span, True on the tokens of the message's own text and False on scaffolding and calls of tools; None where the
    two cannot be told apart."""
    generation_prompt: np.ndarray
    """[n] int32 after the last message, where the reply begins."""
    is_fork: bool
    """True if the template rewrites what the model saw, so that the prompt starts a new root."""

    @property
    def index(self) -> int:
        """Number of replies before this one, whoever wrote them; or the next number that no id of a call begins with.

        So no two calls of a conversation have one id, though its beginning may have been cut off.
        """
        told = (call.get("id", "") for message in self.messages for call in message.get("tool_calls", ()))
        taken = {turn_of(call_id) for call_id in (*told, *(call.id for reply in self.replies.values() for call in reply.tool_calls))}
        number = sum(message["role"] == "assistant" for message in self.messages)
        return next(turn for turn in itertools.count(number) if turn not in taken)
