"""A model behind an OpenAI-compatible server as the one who is measured: words go there, words and calls of tools come back.

In: an endpoint that talks in words. Out: an `EvalPolicy` whose sessions need no tokenizer, and seed each reply as the embedded engine
would, so that a server of ours writes what the model writes in process. Thinking that the server sets apart is put back into the text of
a reply, between the tags that most models write, so that scorers see it as they would in process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.session import eval_seed_scope, request_name, token_sampling
from jaxrl.envs.words import WordsPrompt, WordsReply, WordsSession
from jaxrl.inference.endpoint import ChatReply, ChatRequest
from jaxrl.types import Rollout


class ChatEndpoint(Protocol):
    """A model that talks in words."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation; see `HttpEndpoint.chat` for what it raises."""
        ...


class ServedPolicy:
    """A model behind an endpoint, measured as it is: nobody here counts its versions or can hold them.

    Args:
      endpoint: the model.
      run_seed: part of every sampling key.
    """

    def __init__(self, endpoint: ChatEndpoint, *, run_seed: int) -> None:
        self._endpoint = endpoint
        self._run_seed = run_seed

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[None]:
        """See `EvalPolicy.hold`."""
        del holder
        yield None

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> ServedSession:
        """See `EvalPolicy.open_session`; `history` is the server's business."""
        del history
        return ServedSession(self._endpoint, rollout, sampling, run_seed=self._run_seed)


class ServedSession(WordsSession):
    """The main session of one episode with a served model; others come of `fork` and `restart`.

    Args:
      endpoint: the model.
      rollout: where nodes are recorded; its draw index and member are part of every seed.
      sampling: how tokens are sampled, the same in every turn.
      run_seed: part of every seed.
    """

    def __init__(self, endpoint: ChatEndpoint, rollout: Rollout, sampling: SamplingConfig, *, run_seed: int) -> None:
        super().__init__(rollout, temperature=sampling.temperature, stop=sampling.stop)
        self._endpoint = endpoint
        self._sampling = sampling
        self._run_seed = run_seed

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        """Have the model reply.

        Raises:
          PromptTooLongError: the server says so.
          EngineError, DeadlineError: the request was refused, or not answered in time.
        """
        rollout = self.rollout
        sampling = token_sampling(
            self._sampling, rollout, prompt.turn, run_seed=self._run_seed, seed_scope=eval_seed_scope(rollout.env_name)
        )
        request = ChatRequest(request_name(rollout, prompt.turn), prompt.messages, sampling, tools=prompt.tools)
        reply = await self._endpoint.chat(request)
        return WordsReply(
            whole_text(reply),
            content=reply.text,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            is_stopped=reply.is_stopped,
            num_tokens=reply.num_tokens,
            num_prompt_tokens=reply.num_prompt_tokens,
        )


def whole_text(reply: ChatReply) -> str:
    """Return what a model wrote, with the thinking that was set apart; calls of tools are left out.

    Example:
      >>> whole_text(ChatReply("7", is_stopped=True, reasoning="3 + 4"))
      '<think>3 + 4</think>7'
    """
    if not reply.reasoning:
        return reply.text
    is_cut_in_thought = not reply.is_stopped and not reply.text
    return f"<think>{reply.reasoning}" + ("" if is_cut_in_thought else f"</think>{reply.text}")
