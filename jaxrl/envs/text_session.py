"""One rollout's conversation with somebody who writes words, which are then encoded with the policy's tokenizer.

Two write words: the environment itself, whose reference replies to a task are a demonstration, and a frozen model of another
vocabulary, whose tokens mean nothing to the policy. Either way the rollout holds the tokens that the policy would have to write
to say the same, its stop id included, without logprobs and versions. How the words are encoded is the same as for a prompt, except
that the reply is encoded on its own: it begins where the policy's own would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Demonstration, Message, Reply, TaskSpec, ToolSchema, demonstrated_turns
from jaxrl.envs.session import RecordedSession, request_name, token_sampling
from jaxrl.envs.transcript import Prompt, Transcript, Window, Written
from jaxrl.errors import EngineError, EnvError, PromptTooLongError
from jaxrl.inference.endpoint import ChatReply, ChatRequest, FinishReason
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout, Writer


class TextSource(Protocol):
    """Somebody who writes words."""

    async def write(self, prompt: Prompt) -> ChatReply:
        """Return the reply to a conversation.

        Raises:
          JaxrlError: there is none.
        """
        ...


class ChatPool(Protocol):
    """A model that talks in words."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation; see `FrozenPool.chat` for what it raises."""
        ...


class Demonstrator:
    """The environment's own reference replies to the task of one rollout, said one after the other.

    Args:
      rollout: whose task is demonstrated.
      demonstration: task spec -> the replies; None if the environment has none.
    """

    def __init__(self, rollout: Rollout, demonstration: Callable[[TaskSpec], Demonstration | None]) -> None:
        self._rollout = rollout
        self._demonstration = demonstration

    async def write(self, prompt: Prompt) -> ChatReply:
        """Return the demonstration of a turn.

        Raises:
          EnvError: the environment has none for the task, or fewer than it asks for, or asks in a conversation beside the main one.
        """
        where = f"env {self._rollout.env_name!r}, task {self._rollout.task.id!r}"
        told = self._demonstration(self._rollout.task.spec)
        turns = demonstrated_turns(told)
        if turns is None:
            raise EnvError(
                f"{where}: the environment has no demonstration for this task (`demonstration` returned {told!r}, expected a text, or a "
                "list of texts for several turns); leave such tasks out, or use a frozen model as `sampling.source`"
            )
        if not prompt.turn.isdecimal():
            raise EnvError(f"{where}: asked in a conversation beside the main one, and a demonstration holds the replies of that one only")
        turn = int(prompt.turn)
        if turn >= len(turns):
            held = "1 reply" if len(turns) == 1 else f"{len(turns)} replies"
            raise EnvError(
                f"{where}: asked for turn {turn + 1}, but the task's demonstration has {held}; have `demonstration` return a list with "
                "a text for each turn, or use a frozen model as `sampling.source`"
            )
        return ChatReply(turns[turn], is_stopped=True)


class ForeignModel:
    """A frozen model of another vocabulary.

    Args:
      pool: the model.
      rollout: its draw index and member are part of every seed.
      sampling: how tokens are sampled, the same in every turn; `max_tokens` counts the model's own.
      run_seed: `run.seed`.
    """

    def __init__(self, pool: ChatPool, rollout: Rollout, sampling: SamplingConfig, *, run_seed: int) -> None:
        self._pool = pool
        self._rollout = rollout
        self._sampling = sampling
        self._run_seed = run_seed

    async def write(self, prompt: Prompt) -> ChatReply:
        """Ask the model; raises what its pool raises.

        Raises:
          EnvError: it is to call tools, which its words cannot tell from text.
        """
        rollout = self._rollout
        if prompt.tools:
            raise EnvError(
                f"env {rollout.env_name!r}: the environment offers tools, and the model that writes the replies has another vocabulary "
                "than the policy: how it would call a tool is not how the policy does; use a `sampling.source` with the policy's "
                "tokenizer, or demonstrations"
            )
        sampling = token_sampling(
            self._sampling, rollout, prompt.turn, run_seed=self._run_seed, seed_scope=rollout.env_name, room=prompt.room
        )
        return await self._pool.chat(ChatRequest(request_name(rollout, prompt.turn), prompt.rendered.messages, sampling))


class TextSession(RecordedSession):
    """The main session of one rollout; others come of `fork` and `restart`.

    Args:
      source: who writes.
      renderer: messages to ids and back, with the policy's tokenizer.
      rollout: where nodes are recorded.
      window: what prompt and reply may have together.
      writer: who writes. What a model says and the window does not hold is cut there, as the token limit would; of the environment
        it is an error.
      stop: strings that end a reply, if the source was told of them.
      history: what a later turn makes of earlier ones.
    """

    def __init__(
        self,
        source: TextSource,
        renderer: Renderer,
        rollout: Rollout,
        *,
        window: Window,
        writer: Writer,
        stop: Sequence[str] = (),
        history: History = "template",
    ) -> None:
        super().__init__(Transcript(renderer, rollout, window=window, writer=writer, stop=stop, history=history))
        self._source = source
        self._renderer = renderer
        self._is_model = writer != "demonstrations"

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """See `RecordedSession.ask`; of a demonstration whose first replies alone fit, nothing is to be learned.

        Raises:
          EnvError: the prompt of a later turn leaves no room for the rest of a demonstration.
          JaxrlError: as `RecordedSession.ask`.
        """
        try:
            return await super().ask(messages, tools=tools)
        except PromptTooLongError as error:
            if self._is_model or self._transcript.num_turns == 0:
                raise
            raise EnvError(str(error)) from None

    async def _write(self, prompt: Prompt) -> Written:
        """Get the reply in words, and return the tokens that the policy would write it with.

        Raises:
          EnvError: a demonstration holds the text of a token that ends a reply, or does not fit.
          EngineError: a model's reply holds the text of such a token.
          JaxrlError: whatever the source raised.
        """
        reply = await self._source.write(prompt)
        token_ids = await asyncio.to_thread(self._encode, reply)
        finish_reason = FinishReason.STOP if reply.is_stopped else FinishReason.LENGTH
        if len(token_ids) > prompt.room:
            if not self._is_model:
                raise EnvError(
                    f"{self._transcript.where}: the reply has {len(token_ids)} tokens, and its prompt leaves room for {prompt.room}; raise "
                    "`inference.max_model_len` and `trainer.row_length`, or leave such tasks out"
                )
            token_ids, finish_reason = token_ids[: prompt.room], FinishReason.LENGTH
        return Written(token_ids, finish_reason)

    def _encode(self, reply: ChatReply) -> np.ndarray:
        """Return [N] int32: the words, and the id that ends a turn if the reply ended by itself."""
        token_ids = self._renderer.encode(reply.text, add_special_tokens=False)
        if np.isin(token_ids, self._renderer.stop_ids).any():
            token_id = next(int(i) for i in token_ids if i in self._renderer.stop_ids)
            raise (EngineError if self._is_model else EnvError)(
                f"{self._transcript.where}: the reply holds {self._renderer.decode([token_id])!r}, which ends a reply of the policy: "
                "nothing can follow it, and at the end it is put by itself; leave it out"
            )
        if not reply.is_stopped or reply.stop_string:
            return token_ids
        return np.append(token_ids, np.int32(self._renderer.turn_end_id)).astype(np.int32)


def demonstration_session(
    rollout: Rollout,
    renderer: Renderer,
    demonstration: Callable[[TaskSpec], Demonstration | None],
    *,
    window: Window,
    history: History = "template",
) -> TextSession:
    """Return the session in which the environment itself replies; arguments as those of `TextSession` and `Demonstrator`."""
    source = Demonstrator(rollout, demonstration)
    return TextSession(source, renderer, rollout, window=window, writer="demonstrations", history=history)
