"""One rollout's conversation with somebody who is known by words alone: a served model, or a function of a caller's.

In: messages, and replies in words. Out: nodes on the rollout, one per message and one per reply, without token ids: nobody here has a
tokenizer, so such a rollout can be judged and read, and never trained on. A subclass says who writes (`_write`). It judges nothing
and catches nothing: failures belong to `envs.play`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxrl.envs.base import Message, Reply, ToolSchema
from jaxrl.envs.transcript import given_call
from jaxrl.errors import EnvError
from jaxrl.inference.endpoint import FinishReason
from jaxrl.inference.rendering.messages import plain_messages, plain_tools, told_apart, whole_characters
from jaxrl.inference.rendering.replies import ParsedReply
from jaxrl.types import Node, Rollout, ToolCall


@dataclass(frozen=True, slots=True)
class WordsPrompt:
    """One turn that waits for its reply."""

    messages: tuple[dict[str, Any], ...]
    """The whole conversation, the last message included: content is one text, the arguments of calls are JSON objects (the text as it
    was written, where it is none). A copy: the writer may change it."""
    tools: tuple[dict[str, Any], ...]
    """What the reply may call."""
    turn: str
    """Which turn of which conversation of the rollout, as in `envs.transcript.Prompt`: part of a seed."""


@dataclass(frozen=True, slots=True)
class WordsReply:
    """One reply, as its writer gives it."""

    text: str
    """All of it, as far as the writer shows it; without a stop string."""
    content: str | None = None
    """The text without reasoning and calls of tools; None if they are not told apart, and all of it is."""
    reasoning: str = ""
    """What was set apart as thinking."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it asks for."""
    is_stopped: bool = True
    """False if a token limit cut it."""
    num_tokens: int | None = None
    """Tokens of the reply; None if nobody counted."""
    num_prompt_tokens: int = 0
    """Tokens that the writer was shown; 0 if nobody counted."""


class WordsSession:
    """The main session of one rollout; others come of `fork` and `restart`.

    Args:
      rollout: where nodes are recorded. Node `num_sampled` is what the writer counted, 0 where it did not, though `token_ids` is empty.
      temperature: at which replies are sampled, for the record.
      stop: strings that end a reply; the environment is shown what comes before the first of them.
    """

    def __init__(self, rollout: Rollout, *, temperature: float = 1.0, stop: Sequence[str] = ()) -> None:
        self.rollout = rollout
        self._temperature = temperature
        self._stop = tuple(stop)
        self._messages: tuple[dict[str, Any], ...] = ()
        self._line: tuple[int, ...] = ()
        """Which conversation this is: the main one is (), the second one that was begun from it is (1,), and so on."""
        self._num_begun = 0
        self._num_turns = 0
        self._leaf: int | None = None
        self._is_asking = False

    @property
    def turn(self) -> str:
        """The name of the next turn: its number in the main conversation; in another one, that one's place and the number."""
        return ".".join(map(str, (*self._line, self._num_turns)))

    @property
    def where(self) -> str:
        """The place in the evaluation, for messages; turns are counted from 1."""
        line = "" if not self._line else f" of sub-conversation {'.'.join(str(begun + 1) for begun in self._line)}"
        return f"env {self.rollout.env_name!r}, task {self.rollout.task.id!r}, turn {self._num_turns + 1}{line}"

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Append messages to the conversation and let the writer reply. An empty reply is legal.

        Raises:
          EnvError: a message is none, or the session waits for another reply.
          JaxrlError: whatever `_write` raised.
        """
        if self._is_asking:
            raise EnvError(f"{self.where}: the session was asked while it waits for a reply; `fork` it to ask several things side by side")
        self._is_asking = True
        try:
            new = plain_messages(messages)
            prompt = WordsPrompt(copy.deepcopy(self._messages + new), plain_tools(tools), self.turn)
            written = await self._write(prompt)
        finally:
            self._is_asking = False
        return self._close_turn(new, written)

    def fork(self) -> Self:
        """Return a session that goes on from what was said so far, beside this one."""
        other = self.restart()
        other._messages, other._leaf = self._messages, self._leaf
        return other

    def restart(self) -> Self:
        """Return a session of the same rollout in which nothing was said yet."""
        other = copy.copy(self)
        other._messages, other._leaf, other._is_asking = (), None, False
        other._line, other._num_begun, other._num_turns = (*self._line, self._num_begun), 0, 0
        self._num_begun += 1
        return other

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        """Return the reply to a conversation.

        Raises:
          EngineError: there is none.
          PromptTooLongError: the conversation leaves no room for one.
        """
        raise NotImplementedError

    def _close_turn(self, new: Sequence[dict[str, Any]], written: WordsReply) -> Reply:
        """Record a turn and return what the environment sees of its reply."""
        text = self._shown(whole_characters(written.text))
        content = text if written.content is None else self._shown(whole_characters(written.content))
        said = ParsedReply(content, whole_characters(written.reasoning), written.tool_calls)
        self._record(new, text, written)
        placeholder = {"role": "assistant", "content": content}
        self._messages = told_apart((*self._messages, *new, placeholder), {len(self._messages) + len(new): said})
        self._num_turns += 1
        return Reply(
            text=text,
            is_stopped=written.is_stopped,
            num_tokens=written.num_tokens or 0,
            content=content,
            reasoning=said.reasoning,
            tool_calls=copy.deepcopy(written.tool_calls),  # a tool may change its arguments, and history is told again
            num_prompt_tokens=written.num_prompt_tokens,
        )

    def _shown(self, text: str) -> str:
        """Return what comes before the first stop string."""
        return text[: min((text.find(stop) for stop in self._stop if stop in text), default=len(text))]

    def _record(self, new: Sequence[Mapping[str, Any]], text: str, written: WordsReply) -> None:
        rollout, is_main = self.rollout, not self._line
        if self._num_turns == 0 and not is_main:  # counted when it speaks: a fork may be kept and never needed
            rollout.metrics["sub_conversations"] = rollout.metrics.get("sub_conversations", 0.0) + 1
        for message in new:
            calls = tuple(map(given_call, message.get("tool_calls", ())))
            content = message["content"] or _as_text(calls)
            node = Node(self._leaf, message["role"], content, np.zeros(0, np.int32), name=message.get("name"), tool_calls=calls)
            self._add(node)
        self._add(
            Node(
                parent=self._leaf,
                role="assistant",
                content=text,
                token_ids=np.zeros(0, np.int32),
                sampled=True,
                num_sampled=written.num_tokens or 0,
                temperature=self._temperature,
                finish_reason=str(FinishReason.STOP if written.is_stopped else FinishReason.LENGTH),
                tool_calls=written.tool_calls,
            )
        )
        if is_main:
            rollout.is_truncated = not written.is_stopped

    def _add(self, node: Node) -> None:
        self.rollout.nodes.append(node)
        self._leaf = len(self.rollout.nodes) - 1


def _as_text(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{call.name}({call.raw})" for call in calls)
