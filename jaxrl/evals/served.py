"""A model behind an OpenAI-compatible server as the one who is measured: words go there, words and calls of tools come back.

In: an endpoint that talks in words. Out: an `EvalPolicy` whose sessions need no tokenizer, and seed each reply as the embedded engine
would, so that a server of ours writes what the model writes in process. A server that is gone fails no episode: the `Outage` is told, and
whoever runs the evaluation ends it, so that the episodes that are missing can be played later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.session import eval_seed_scope
from jaxrl.envs.words import WordsPrompt, WordsReply, WordsSession
from jaxrl.errors import EndpointDownError, JaxrlError
from jaxrl.inference.endpoint import ChatReply, ChatRequest, TokenSampling, sampling_seed
from jaxrl.types import Rollout


class ChatEndpoint(Protocol):
    """A model that talks in words."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation; see `HttpEndpoint.chat` for what it raises."""
        ...


class Outage:
    """What ended an evaluation for everybody: a server that all episodes need is gone. Used from one event loop."""

    def __init__(self) -> None:
        self.cause: JaxrlError | None = None
        """What was found; None while all is well."""
        self._is_told = asyncio.Event()

    async def suspend(self, cause: JaxrlError) -> None:
        """Report an outage from an episode, and keep that episode until it is cancelled or its deadline passes.

        Raises:
          asyncio.CancelledError: always, sooner or later.
        """
        self.cause = self.cause or cause
        self._is_told.set()
        await asyncio.get_running_loop().create_future()

    async def reported(self) -> JaxrlError:
        """Wait for an outage, which may never come, and return its cause."""
        await self._is_told.wait()
        assert self.cause is not None
        return self.cause


class ServedPolicy:
    """A model behind an endpoint, measured as it is: nobody here counts its versions or can hold them.

    Args:
      endpoint: the model.
      run_seed: part of every sampling key.
      outage: told when the endpoint is down.
    """

    def __init__(self, endpoint: ChatEndpoint, *, run_seed: int, outage: Outage) -> None:
        self._endpoint = endpoint
        self._run_seed = run_seed
        self._outage = outage

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[None]:
        """See `EvalPolicy.hold`."""
        del holder
        yield None

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> ServedSession:
        """See `EvalPolicy.open_session`; `history` is the server's business."""
        del history
        return ServedSession(self._endpoint, rollout, sampling, run_seed=self._run_seed, outage=self._outage)


class ServedSession(WordsSession):
    """The main session of one episode with a served model; others come of `fork` and `restart`.

    Args:
      endpoint: the model.
      rollout: where nodes are recorded; its draw index and member are part of every seed.
      sampling: how tokens are sampled, the same in every turn.
      run_seed: part of every seed.
      outage: told when the endpoint is down.
    """

    def __init__(self, endpoint: ChatEndpoint, rollout: Rollout, sampling: SamplingConfig, *, run_seed: int, outage: Outage) -> None:
        super().__init__(rollout, temperature=sampling.temperature, stop=sampling.stop)
        self._endpoint = endpoint
        self._sampling = sampling
        self._run_seed = run_seed
        self._outage = outage

    async def _write(self, prompt: WordsPrompt) -> WordsReply:
        """Have the model reply.

        Raises:
          PromptTooLongError: the server says so.
          EngineError, DeadlineError: the request was refused, or not answered in time.
        """
        rollout, sampling = self.rollout, self._sampling
        request = ChatRequest(
            f"{rollout.group_id}/{rollout.member}/{prompt.turn}",
            prompt.messages,
            TokenSampling(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling_seed(self._run_seed, eval_seed_scope(rollout.env_name), rollout.draw_index, rollout.member, prompt.turn),
                stop=tuple(sampling.stop),
            ),
            tools=prompt.tools,
        )
        try:
            reply = await self._endpoint.chat(request)
        except EndpointDownError as error:
            await self._outage.suspend(error)
            raise
        return WordsReply(
            reply.text,
            content=reply.text,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
            is_stopped=reply.is_stopped,
            num_tokens=reply.num_tokens,
            num_prompt_tokens=reply.num_prompt_tokens,
        )
