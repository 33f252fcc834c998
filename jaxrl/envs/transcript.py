"""What was said in one rollout, token by token: turns are opened here and closed here, whoever writes the replies.

In: messages, and the ids of each reply. Out: prompts to answer, and one node per message and one per reply on the rollout. Ids are
recorded as they come. It asks nobody, scores nothing and catches nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.envs.base import Message, Reply
from jaxrl.errors import PromptTooLongError
from jaxrl.inference.endpoint import FinishReason
from jaxrl.inference.rendering import RenderedTurn, Renderer, RenderState
from jaxrl.types import Node, Rollout, Writer


@dataclass(frozen=True, slots=True)
class Window:
    """How many tokens a conversation may have."""

    num_tokens: int
    """Prompt plus reply."""
    set_by: str = "`inference.max_model_len`"
    """What sets it, for messages."""


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
    """The conversation of one rollout.

    Args:
      renderer: messages to ids and back, with the policy's tokenizer.
      rollout: where nodes are recorded.
      window: what prompt and reply may have together.
      writer: who writes the replies.
      stop: strings that end a reply; the environment is shown what comes before the first of them.
    """

    def __init__(self, renderer: Renderer, rollout: Rollout, *, window: Window, writer: Writer, stop: Sequence[str] = ()) -> None:
        self.rollout = rollout
        self._renderer = renderer
        self._window = window
        self._writer: Writer = writer
        self._stop = tuple(stop)
        self._state: RenderState | None = None

    @property
    def where(self) -> str:
        """The place in the run, for messages."""
        rollout = self.rollout
        return f"env {rollout.env_name!r}, task {rollout.task.id!r}, turn {rollout.num_turns}"

    async def open_turn(self, messages: Sequence[Message]) -> tuple[RenderedTurn, int]:
        """Render the prompt of the next reply in a worker thread.

        Returns:
          The prompt, and how many tokens the reply may have, at least 1.

        Raises:
          EnvError: the messages cannot be rendered.
          PromptTooLongError: the prompt leaves no room for one token of reply.
        """
        turn = await asyncio.to_thread(self._renderer.open_turn, self._state, messages)
        num_tokens, window = len(turn.prompt_ids), self._window
        if num_tokens >= window.num_tokens:
            raise PromptTooLongError(
                f"{self.where}: the prompt has {num_tokens} tokens and the window is {window.num_tokens}, which leaves no room for a "
                f"reply; shorten it or raise {window.set_by}"
            )
        return turn, window.num_tokens - num_tokens

    async def close_turn(self, turn: RenderedTurn, written: Written) -> Reply:
        """Record a turn with its reply and return what the environment sees of it. An empty reply is legal."""
        self._state = await asyncio.to_thread(self._renderer.close_turn, turn, written.token_ids)
        text = str(self._state.messages[-1]["content"])
        self._record(turn, written, text)
        cuts = [text.find(stop) for stop in self._stop if stop in text]
        return Reply(
            text=text[: min(cuts)] if cuts else text,
            is_stopped=written.finish_reason is FinishReason.STOP,
            num_tokens=len(written.token_ids),
        )

    def _record(self, turn: RenderedTurn, written: Written, text: str) -> None:
        nodes = self.rollout.nodes
        parent = None if turn.is_fork or not nodes else len(nodes) - 1
        for message, span in zip(turn.span_messages, turn.spans, strict=True):
            nodes.append(Node(parent=parent, role=message["role"], content=message["content"], token_ids=span))
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
            )
        )
        self.rollout.metrics["forks"] = float(sum(node.parent is None for node in nodes) - 1)
