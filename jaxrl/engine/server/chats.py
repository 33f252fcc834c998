"""The turns of chats: from the words that a client sends to the tokens that the model goes on from, and back.

In: a body's messages and tools. Out: a prompt; and when it was answered, what the client is told and what is remembered of it. A
conversation that begins with one that this server replied to goes on from the very ids of then (`inference.chat.conversations`); any other
is rendered anew. Called in worker threads; the memory is the only thing that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxrl.config.turns import History
from jaxrl.inference.chat.conversations import ConversationMemory, Heard, hear
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.chat.reply_stream import ReplyTeller
from jaxrl.inference.chat.wire import ChatFieldError, Message, read_messages, read_tool_choice, read_tools
from jaxrl.inference.endpoint import TokenSampling
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.messages import plain_messages, plain_tools
from jaxrl.inference.rendering.turns import RenderedTurn

Check = Callable[[str], np.ndarray]
"""Encodes a prompt, and refuses one that is too long."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn of a chat."""

    rendered: RenderedTurn
    """Its prompt."""
    number: int
    """What the ids of its calls begin with: `rendered.index`, which takes a look at every message."""
    heard: Heard
    """The conversation, as the client knows it."""
    takes_calls: bool
    """Whether the client gave tools and lets them be called."""
    is_parallel: bool
    """Whether it takes more than one call in a reply."""


class Chats:
    """The chats of one served model.

    Args:
      renderer: its tokenizer and chat template.
      memory: what was said.
      history: what a later turn makes of earlier ones.
    """

    def __init__(self, renderer: Renderer, memory: ConversationMemory, history: History = "template") -> None:
        self._renderer = renderer
        self._memory = memory
        self._history: History = history

    def open(
        self,
        messages: Sequence[Any],
        *,
        tools: Any = None,
        tool_choice: Any = None,
        is_parallel: bool = True,
        salt: str = "",
        check: Check,
    ) -> ChatTurn:
        """Return the turn that a body asks for.

        Args:
          messages: the whole conversation.
          tools: what the model may call, if anything.
          tool_choice: whether it may.
          is_parallel: whether the client takes more than one call.
          salt: conversations of different salts are remembered apart.
          check: called with the text of the whole conversation before the costly part.

        Raises:
          Refusal: a field cannot be used.
          EnvError: the template refuses the conversation.
        """
        conversation, schemas = read_chat(messages, tools)
        try:
            may_call = read_tool_choice(tool_choice)
        except ChatFieldError as error:
            raise _refusal(error) from error
        prompt_ids = check(text := self._renderer.prompt_text(conversation, schemas))
        heard = hear(conversation, schemas, salt)
        prior, num_known = self._memory.recall(heard)
        if prior is None and not self._renderer.knows_model:
            rendered = _opened(conversation, schemas, text, prompt_ids)
        else:
            rendered = self._renderer.open_turn(prior, conversation[num_known:], tools=schemas, history=self._history)
        self._memory.count(_what(conversation, is_known=prior is not None, is_fork=rendered.is_fork))
        return ChatTurn(rendered, rendered.index, heard, takes_calls=bool(schemas) and may_call, is_parallel=is_parallel)

    def teller(self, turn: ChatTurn, sampling: TokenSampling) -> ReplyTeller:
        """Return what tells one reply to a turn."""
        return ReplyTeller(
            partial(self._renderer.parser.parse, turn=turn.number),
            stop_ids=sampling.stop_ids,
            stops=sampling.stop,
            takes_calls=turn.takes_calls,
            is_parallel=turn.is_parallel,
        )

    def close(self, turn: ChatTurn, message: Mapping[str, Any], token_ids: np.ndarray) -> None:
        """Remember a reply.

        Args:
          turn: what was replied to.
          message: the reply, as the client was told it.
          token_ids: [N] int32, as it was sampled.
        """
        self._memory.remember(turn.heard.with_reply(message), self._renderer.close_turn(turn.rendered, token_ids))

    def stats(self) -> dict[str, int]:
        """Return what is remembered, and what became of the turns since the start."""
        return self._memory.stats()


def read_chat(messages: Sequence[Any], tools: Any = None) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """Return the messages and tools of a body, checked and in one spelling.

    Raises:
      Refusal: one is malformed.
    """
    try:
        return read_messages(messages), () if tools is None else read_tools(tools)
    except ChatFieldError as error:
        raise _refusal(error) from error


def _opened(messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str, prompt_ids: np.ndarray) -> RenderedTurn:
    """Return the turn of a conversation that goes on from nothing, as one span: telling its messages apart takes a rendering of each."""
    return RenderedTurn(
        messages=plain_messages(messages),
        tools=plain_tools(tools),
        replies={},
        text=text,
        template_text=text,
        prompt_ids=prompt_ids,
        spans=(prompt_ids,),
        content_masks=(None,),
        generation_prompt=np.zeros(0, np.int32),
        is_fork=False,
    )


def _refusal(error: ChatFieldError) -> Refusal:
    return Refusal(400, str(error), param=error.field.partition("[")[0])


def _what(conversation: Sequence[Message], *, is_known: bool, is_fork: bool) -> str:
    """Return what became of what was said before: nothing was, it goes on, it was rewritten, or nobody knows it."""
    if is_known:
        return "forked" if is_fork else "continued"
    return "unknown" if any(message["role"] == "assistant" for message in conversation) else "opened"
