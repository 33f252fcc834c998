"""The conversations of one rollout with a model that reads and writes the policy's tokens: the policy, or a frozen model.

An environment calls `ask`; the session has the prompt rendered, clamps the reply to the window, seeds it, sends it to the
pool, and has the ids that come back recorded as they are. A policy's tokens come with their logprobs and versions; a frozen
model's have neither, and none are asked for. It scores nothing and catches nothing: failures belong to `envs.play`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Message, Reply, ToolSchema
from jaxrl.envs.transcript import Prompt, Transcript, Window, Written
from jaxrl.errors import EngineError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, TokenSampling, sampling_seed
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout


def eval_seed_scope(env_name: str) -> str:
    """Return the seed scope of evaluation on an environment; names hold no colon, so no training scope equals it."""
    return f"eval:{env_name}"


def token_sampling(
    sampling: SamplingConfig,
    rollout: Rollout,
    turn: str,
    *,
    run_seed: int,
    seed_scope: str,
    room: int | None = None,
    stop_ids: tuple[int, ...] = (),
) -> TokenSampling:
    """Return how a reply is sampled: as configured, with a seed of its own, in as many tokens as there is room for.

    One function for every session, so that a model is seeded alike wherever it answers.

    Args:
      sampling: the configuration.
      rollout: its draw index and member are part of the seed.
      turn: which turn of which conversation of the rollout; part of the seed too.
      run_seed: `run.seed`.
      seed_scope: the environment's name in training, `eval_seed_scope(name)` in evaluation.
      room: tokens that prompt and window leave for the reply; None if the server alone knows.
      stop_ids: ids that end the reply, for a server that is asked in tokens.
    """
    return TokenSampling(
        max_tokens=sampling.max_tokens if room is None else min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling_seed(run_seed, seed_scope, rollout.draw_index, rollout.member, turn),
        stop_ids=stop_ids,
        stop=tuple(sampling.stop),
    )


def request_name(rollout: Rollout, turn: str) -> str:
    """Return a name for the request of a turn, unique among those of a run that are alive."""
    return f"{rollout.group_id}/{rollout.member}/{turn}"


class RecordedSession:
    """A conversation whose every token is recorded, whoever writes the replies: a subclass says who (`_write`)."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Append messages to the conversation and let the model reply. An empty reply is legal.

        Raises:
          EnvError: the messages cannot be rendered, or the session waits for another reply.
          PromptTooLongError: the prompt leaves no room for one token of reply.
          JaxrlError: whatever `_write` raised.
        """
        transcript = self._transcript
        with transcript.asking():
            prompt = await transcript.open_turn(messages, tools)
            return await transcript.close_turn(prompt, await self._write(prompt))

    def fork(self) -> Self:
        """Return a session that goes on from what was said so far, beside this one."""
        return self._with(self._transcript.fork())

    def restart(self) -> Self:
        """Return a session of the same rollout in which nothing was said yet."""
        return self._with(self._transcript.restart())

    def _with(self, transcript: Transcript) -> Self:
        other = copy.copy(self)
        other._transcript = transcript
        return other

    async def _write(self, prompt: Prompt) -> Written:
        """Return the reply to a prompt."""
        raise NotImplementedError


class PolicySession(RecordedSession):
    """The main session of one rollout; others come of `fork` and `restart`.

    Args:
      pool: the policy, or the frozen model that answers in its place.
      renderer: messages to ids and back.
      rollout: where nodes are recorded; its draw index and member are part of every seed.
      sampling: how tokens are sampled, the same in every turn.
      run_seed: `run.seed`.
      seed_scope: the environment's name in training, `eval_seed_scope(name)` in evaluation.
      window: prompt plus reply tokens that the policy can hold.
      cache_salt: called for each request; see `GenerateRequest.cache_salt`.
      is_frozen: the pool is a frozen model's.
      history: what a later turn makes of earlier ones.
    """

    def __init__(
        self,
        pool: Pool,
        renderer: Renderer,
        rollout: Rollout,
        sampling: SamplingConfig,
        *,
        run_seed: int,
        seed_scope: str,
        window: int | Window,
        cache_salt: Callable[[], str | None] = lambda: None,
        is_frozen: bool = False,
        history: History = "template",
    ) -> None:
        super().__init__(
            Transcript(
                renderer,
                rollout,
                window=Window(window) if isinstance(window, int) else window,
                writer="frozen" if is_frozen else "policy",
                stop=sampling.stop,
                history=history,
            )
        )
        self._pool = pool
        self._stop_ids = renderer.stop_ids
        self._num_ids = renderer.num_ids if is_frozen else None
        self._sampling = sampling
        self._run_seed = run_seed
        self._seed_scope = seed_scope
        self._cache_salt = cache_salt
        self._is_frozen = is_frozen

    async def _write(self, prompt: Prompt) -> Written:
        """Have the model reply.

        Raises:
          EngineError: the endpoint failed, or its answer breaks the contract of `Generation`.
          DeadlineError: the endpoint's own deadline passed.
        """
        request = self._request(prompt)
        generation = await self._pool.generate(request)
        _check(generation, request)
        if self._num_ids is not None and np.any(generation.token_ids >= self._num_ids):
            raise EngineError(
                f"request {request.request_id!r}: the frozen model wrote token id {int(generation.token_ids.max())}, and the policy's "
                f"vocabulary ends at {self._num_ids - 1}"
            )
        return Written(
            generation.token_ids,
            generation.finish_reason,
            temperature=self._sampling.temperature,
            logprobs=None if self._is_frozen else generation.logprobs,
            versions=None if self._is_frozen else generation.versions,
        )

    def _request(self, prompt: Prompt) -> GenerateRequest:
        rollout = self._transcript.rollout
        return GenerateRequest(
            request_id=request_name(rollout, prompt.turn),
            token_ids=prompt.rendered.prompt_ids,
            sampling=token_sampling(
                self._sampling,
                rollout,
                prompt.turn,
                run_seed=self._run_seed,
                seed_scope=self._seed_scope,
                room=prompt.room,
                stop_ids=self._stop_ids,
            ),
            wants_logprobs=not self._is_frozen,
            cache_salt=self._cache_salt(),
        )


def _check(generation: Generation, request: GenerateRequest) -> None:
    """Refuse an answer that cannot be trained on: a wanted logprob that is missing is an error, never a logprob of 0."""
    lengths = {name: len(getattr(generation, name)) for name in ("token_ids", "logprobs", "versions")}
    if len(set(lengths.values())) != 1:
        raise EngineError(f"request {request.request_id!r}: the endpoint's arrays differ in length: {lengths}")
    if request.wants_logprobs and not np.isfinite(generation.logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(generation.logprobs))[0])
        raise EngineError(
            f"request {request.request_id!r}: the logprob of sampled token {position} is {float(generation.logprobs[position])!r}, "
            "expected a finite number"
        )
    if generation.finish_reason is FinishReason.CANCELLED:
        raise EngineError(f"request {request.request_id!r} was cancelled after {lengths['token_ids']} tokens")
