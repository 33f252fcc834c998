"""One rollout's conversation with a model that reads and writes the policy's tokens: the policy, or a frozen model.

An environment calls `ask`; the session has the prompt rendered, clamps the reply to the window, seeds it, sends it to the
pool, and has the ids that come back recorded as they are. A policy's tokens come with their logprobs and versions; a frozen
model's have neither, and none are asked for. It scores nothing and catches nothing: failures belong to `envs.play`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Message, Reply
from jaxrl.envs.transcript import Transcript, Window, Written
from jaxrl.errors import EngineError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, TokenSampling, sampling_seed
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import RenderedTurn, Renderer
from jaxrl.types import Rollout


def eval_seed_scope(env_name: str) -> str:
    """Return the seed scope of evaluation on an environment; names hold no colon, so no training scope equals it."""
    return f"eval:{env_name}"


def token_sampling(
    sampling: SamplingConfig, rollout: Rollout, *, run_seed: int, seed_scope: str, room: int, stop_ids: tuple[int, ...] = ()
) -> TokenSampling:
    """Return how the rollout's next turn is sampled: as configured, in at most `room` tokens, with a seed of its own."""
    return TokenSampling(
        max_tokens=min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling_seed(run_seed, seed_scope, rollout.draw_index, rollout.member, rollout.num_turns),
        stop_ids=stop_ids,
        stop=tuple(sampling.stop),
    )


def request_name(rollout: Rollout) -> str:
    """Return a name for the request of the rollout's next turn, unique among those of a run that are alive."""
    return f"{rollout.group_id}/{rollout.member}/{rollout.num_turns}"


class PolicySession:
    """The session of one rollout.

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
    ) -> None:
        self._pool = pool
        self._stop_ids = renderer.stop_ids
        self._num_ids = renderer.num_ids if is_frozen else None
        self._sampling = sampling
        self._run_seed = run_seed
        self._seed_scope = seed_scope
        self._cache_salt = cache_salt
        self._is_frozen = is_frozen
        self._transcript = Transcript(
            renderer,
            rollout,
            window=Window(window) if isinstance(window, int) else window,
            writer="frozen" if is_frozen else "policy",
            stop=sampling.stop,
        )

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Append messages to the conversation and let the model reply. An empty reply is legal.

        Raises:
          EnvError: the messages cannot be rendered.
          PromptTooLongError: the prompt leaves no room for one token of reply.
          EngineError: the endpoint failed, or its answer breaks the contract of `Generation`.
          DeadlineError: the endpoint's own deadline passed.
        """
        turn, room = await self._transcript.open_turn(messages)
        request = self._request(turn, room)
        generation = await self._pool.generate(request)
        _check(generation, request)
        if self._num_ids is not None and np.any(generation.token_ids >= self._num_ids):
            raise EngineError(
                f"request {request.request_id!r}: the frozen model wrote token id {int(generation.token_ids.max())}, and the policy's "
                f"vocabulary ends at {self._num_ids - 1}"
            )
        written = Written(
            generation.token_ids,
            generation.finish_reason,
            temperature=self._sampling.temperature,
            logprobs=None if self._is_frozen else generation.logprobs,
            versions=None if self._is_frozen else generation.versions,
        )
        return await self._transcript.close_turn(turn, written)

    def _request(self, turn: RenderedTurn, room: int) -> GenerateRequest:
        rollout = self._transcript.rollout
        return GenerateRequest(
            request_id=request_name(rollout),
            token_ids=turn.prompt_ids,
            sampling=token_sampling(
                self._sampling, rollout, run_seed=self._run_seed, seed_scope=self._seed_scope, room=room, stop_ids=self._stop_ids
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
