"""What was said in one rollout, token by token: turns are opened here and closed here, whoever writes the replies.

In: messages, and the ids of each reply. Out: prompts to answer, and nodes on the rollout: one per message and one per reply, each
after the one that it follows. Several conversations of a rollout share what they have in common, and a history that was rewritten
shares its beginning, so every sampled token has one node. Ids are recorded as they come. It asks nobody, scores nothing and catches
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.config.turns import History
from jaxrl.envs.base import Message, Reply, ToolSchema
from jaxrl.errors import EnvError, PromptTooLongError
from jaxrl.inference.endpoint import FinishReason
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState
from jaxrl.types import Node, Rollout, ToolCall, Writer


@dataclass(frozen=True, slots=True)
class Window:
    """How many tokens a conversation may have."""

    num_tokens: int
    """Prompt plus reply."""
    set_by: str = "`inference.max_model_len`"
    """What sets it, for messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn that waits for its reply."""

    rendered: RenderedTurn
    """The tokens to answer, and the messages that they stand for."""
    room: int
    """How many tokens the reply may have, at least 1."""
    turn: str
    """Which turn of which conversation of the rollout; no two have the same, and it does not depend on timing."""
    tools: Sequence[ToolSchema] = ()
    """What the reply may call."""


@dataclass(frozen=True, slots=True)
class Written:
    """One reply, as it was written."""

    token_ids: np.ndarray
    """[N] int32, the stop id included."""
    finish_reason: FinishReason
    """Why it ended."""
    temperature: float = 1.0
    """Temperature at which it was sampled; 1 where nothing was."""
    logprobs: np.ndarray | None = None
    """[N] float32 of a policy's reply; None of any other."""
    versions: np.ndarray | None = None
    """[N] int32 of a policy's reply; None of any other."""


class Transcript:
    """One conversation of a rollout: the main one, or one that was forked from another or started beside it.

    Args:
      renderer: messages to ids and back, with the policy's tokenizer.
      rollout: where nodes are recorded.
      window: what prompt and reply may have together.
      writer: who writes the replies.
      stop: strings that end a reply; the environment is shown what comes before the first of them.
      history: what a later turn makes of earlier ones.
    """

    def __init__(
        self,
        renderer: Renderer,
        rollout: Rollout,
        *,
        window: Window,
        writer: Writer,
        stop: Sequence[str] = (),
        history: History = "template",
    ) -> None:
        self.rollout = rollout
        self.num_turns = 0
        """Replies in this conversation, those before it was forked left out."""
        self._renderer = renderer
        self._window = window
        self._writer: Writer = writer
        self._stop = tuple(stop)
        self._history: History = history
        self._line: tuple[int, ...] = ()
        """Which conversation this is: the main one is (), the second one that was begun from it is (1,), and so on."""
        self._num_begun = 0
        self._leaf: int | None = None
        self._state: RenderState | None = None
        """The last turn, with all its tokens; earlier ones are in the rollout's nodes only."""
        self._is_asking = False

    @property
    def is_main(self) -> bool:
        """True for the conversation that the rollout began with."""
        return not self._line

    @property
    def turn(self) -> str:
        """The name of the next turn: its number in the main conversation; in another one, that one's place and the number."""
        return ".".join(map(str, (*self._line, self.num_turns)))

    @property
    def where(self) -> str:
        """The place in the run, for messages: people count turns from 1, as `jaxrl.rollouts` does."""
        rollout = self.rollout
        line = "" if self.is_main else f" of sub-conversation {'.'.join(str(begun + 1) for begun in self._line)}"
        return f"env {rollout.env_name!r}, task {rollout.task.id!r}, turn {self.num_turns + 1}{line}"

    def fork(self) -> Transcript:
        """Return a conversation that goes on from here, beside this one."""
        other = self.restart()
        other._leaf, other._state = self._leaf, self._state
        return other

    def restart(self) -> Transcript:
        """Return a conversation of the same rollout in which nothing was said yet."""
        other = Transcript(self._renderer, self.rollout, window=self._window, writer=self._writer, stop=self._stop, history=self._history)
        other._line = (*self._line, self._num_begun)
        self._num_begun += 1
        return other

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Hold the conversation while a turn is open.

        Raises:
          EnvError: another turn is open.
        """
        if self._is_asking:
            raise EnvError(f"{self.where}: the session was asked while it waits for a reply; `fork` it to ask several things side by side")
        self._is_asking = True
        try:
            yield
        finally:
            self._is_asking = False

    async def open_turn(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Prompt:
        """Render the prompt of the next reply in a worker thread.

        Raises:
          EnvError: the messages cannot be rendered.
          PromptTooLongError: the prompt leaves no room for one token of reply.
        """
        rendered = await asyncio.to_thread(self._renderer.open_turn, self._state, messages, tools=tools, history=self._history)
        num_tokens, window = len(rendered.prompt_ids), self._window
        if num_tokens >= window.num_tokens:
            raise PromptTooLongError(
                f"{self.where}: the prompt has {num_tokens} tokens and the window is {window.num_tokens}, which leaves no room for a "
                f"reply; shorten it or raise {window.set_by}"
            )
        return Prompt(rendered, window.num_tokens - num_tokens, self.turn, tools)

    async def close_turn(self, prompt: Prompt, written: Written) -> Reply:
        """Record a turn with its reply and return what the environment sees of it. An empty reply is legal."""
        state, text = await asyncio.to_thread(self._close, prompt.rendered, written.token_ids)
        said = state.reply
        self._record(prompt.rendered, written, text, said.tool_calls)
        self._state = state
        self.num_turns += 1
        return Reply(
            text=self._shown(text),
            is_stopped=written.finish_reason is FinishReason.STOP,
            num_tokens=len(written.token_ids),
            content=self._shown(said.content),
            reasoning=said.reasoning,
            tool_calls=copy.deepcopy(said.tool_calls),  # a tool may change its arguments, and history may be told again
            num_prompt_tokens=len(prompt.rendered.prompt_ids),
            has_unread_call=said.has_unread_call,
        )

    def _close(self, turn: RenderedTurn, token_ids: np.ndarray) -> tuple[RenderState, str]:
        return self._renderer.close_turn(turn, token_ids), self._renderer.reply_text(token_ids)

    def _shown(self, text: str) -> str:
        """Return what comes before the first stop string."""
        return text[: min((text.find(stop) for stop in self._stop if stop in text), default=len(text))]

    def _record(self, turn: RenderedTurn, written: Written, text: str, calls: tuple[ToolCall, ...]) -> None:
        rollout = self.rollout
        metrics, nodes = rollout.metrics, rollout.nodes
        num_told = len(self._state.messages) if self._state else 0
        metrics["forks"] = metrics.get("forks", 0.0) + float(turn.is_fork)
        if self.num_turns == 0 and not self.is_main:  # counted when it speaks: a fork may be kept and never needed
            metrics["sub_conversations"] = metrics.get("sub_conversations", 0.0) + 1
        parent, num_shared = self._shared(np.concatenate(turn.spans), None if turn.is_fork else self._leaf)
        for index, token_ids, is_content in _spans_after(turn, num_shared):
            nodes.append(_message_node(parent, turn, index, token_ids, is_content, is_retold=index < num_told))
            parent = len(nodes) - 1
        nodes.append(
            Node(
                parent=parent,
                role="assistant",
                content=text,
                token_ids=np.concatenate([turn.generation_prompt, written.token_ids]).astype(np.int32),
                sampled=True,
                logprobs=written.logprobs,
                versions=written.versions,
                num_sampled=len(written.token_ids),
                temperature=written.temperature,
                finish_reason=str(written.finish_reason),
                source=self._writer,
                tool_calls=calls,
            )
        )
        self._leaf = len(nodes) - 1
        if self.is_main:
            rollout.is_truncated = written.finish_reason is FinishReason.LENGTH

    def _shared(self, token_ids: np.ndarray, start: int | None) -> tuple[int | None, int]:
        """Return the last node of the longest path after `start` that `token_ids` begins with, and how many of them it has."""
        ends: dict[int | None, int] = {start: 0}
        for index, node in enumerate(self.rollout.nodes):  # parents come before their children
            begin = ends.get(node.parent)
            if begin is not None and np.array_equal(node.token_ids, token_ids[begin : begin + len(node.token_ids)]):
                ends[index] = begin + len(node.token_ids)
        last = max(ends, key=lambda index: ends[index])
        return last, ends[last]


def _spans_after(turn: RenderedTurn, num_shared: int) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    """Yield the spans of a turn, but for their first `num_shared` tokens: index into `turn.messages`, token ids, content mask.

    What closes a message whose text is shared goes to the message after it, as after a reply.
    """
    carried = np.zeros(0, np.int32)
    first, last = len(turn.messages) - len(turn.spans), len(turn.messages) - 1
    for index, (span, is_content) in enumerate(zip(turn.spans, turn.content_masks, strict=True), start=first):
        if num_shared > 0 and num_shared >= len(span):
            num_shared -= len(span)
            continue
        token_ids = np.concatenate([carried, span[num_shared:]])
        if is_content is not None:
            is_content = np.concatenate([np.zeros(len(carried), bool), is_content[num_shared:]])
        is_rest = num_shared > 0 and index < last and (is_content is None or not is_content.any())
        num_shared = 0
        if is_rest:
            carried = token_ids
        else:
            carried = np.zeros(0, np.int32)
            yield index, token_ids, is_content


def _message_node(
    parent: int | None, turn: RenderedTurn, index: int, token_ids: np.ndarray, is_content: np.ndarray | None, *, is_retold: bool
) -> Node:
    message, reply = turn.messages[index], turn.replies.get(index)
    calls = tuple(map(given_call, message.get("tool_calls", ()))) if reply is None else reply.tool_calls
    content = message["content"] if reply is None else reply.content
    return Node(
        parent=parent,
        role=message["role"],
        content=content or "\n".join(f"{call.name}({call.raw})" for call in calls),
        token_ids=np.asarray(token_ids, np.int32),
        is_content=is_content,
        name=message.get("name"),
        tool_calls=calls,
        is_retold=is_retold,
    )


def given_call(call: Mapping[str, Any]) -> ToolCall:
    """Return a call that a message of the environment holds, for people and logs."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(arguments, str):
        return ToolCall(call.get("id", ""), name, None, raw=arguments, error="the arguments are no JSON object")
    return ToolCall(call.get("id", ""), name, dict(arguments), raw=json.dumps(arguments, ensure_ascii=False))
