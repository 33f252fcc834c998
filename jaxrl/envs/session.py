"""One rollout's conversation with the policy: messages in, replies out, every token recorded on the rollout.

An environment calls `ask`; the session renders the prompt in a worker thread, clamps the reply to the window, seeds it,
sends it to the pool, and appends one node per message and one for the reply. The ids that the pool returns are recorded
as they are. It scores nothing and catches nothing: failures belong to `envs.play`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Message, Reply
from jaxrl.errors import EngineError, PromptTooLongError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, TokenSampling, sampling_seed
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import RenderedTurn, Renderer, RenderState
from jaxrl.types import Node, Rollout


def eval_seed_scope(env_name: str) -> str:
    """Return the seed scope of evaluation on an environment; names hold no colon, so no training scope equals it."""
    return f"eval:{env_name}"


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
        window: int,
    ) -> None:
        self._pool = pool
        self._renderer = renderer
        self._rollout = rollout
        self._sampling = sampling
        self._run_seed = run_seed
        self._seed_scope = seed_scope
        self._window = window
        self._state: RenderState | None = None

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Append messages to the conversation and let the policy reply. An empty reply is legal.

        Raises:
          EnvError: the messages cannot be rendered.
          PromptTooLongError: the prompt leaves no room for one token of reply.
          EngineError: the endpoint failed, or its answer breaks the contract of `Generation`.
          DeadlineError: the endpoint's own deadline passed.
        """
        turn = await asyncio.to_thread(self._renderer.open_turn, self._state, messages)
        request = self._request(turn)
        generation = await self._pool.generate(request)
        _check(generation, request)
        self._state = await asyncio.to_thread(self._renderer.close_turn, turn, generation.token_ids)
        text = str(self._state.messages[-1]["content"])
        self._record(turn, generation, text)
        return Reply(
            text=self._until_stop_string(text),
            is_stopped=generation.finish_reason is FinishReason.STOP,
            num_tokens=len(generation.token_ids),
        )

    def _request(self, turn: RenderedTurn) -> GenerateRequest:
        rollout, sampling = self._rollout, self._sampling
        room = self._window - len(turn.prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"env {rollout.env_name!r}, task {rollout.task.id!r}, turn {rollout.num_turns}: the prompt has "
                f"{len(turn.prompt_ids)} tokens and the window is {self._window}, which leaves no room for a reply; "
                "shorten it or raise `inference.max_model_len`"
            )
        return GenerateRequest(
            request_id=f"{rollout.group_id}/{rollout.member}/{rollout.num_turns}",
            token_ids=turn.prompt_ids,
            sampling=TokenSampling(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling_seed(self._run_seed, self._seed_scope, rollout.draw_index, rollout.member, rollout.num_turns),
                stop_ids=self._renderer.stop_ids,
                stop=tuple(sampling.stop),
            ),
        )

    def _record(self, turn: RenderedTurn, generation: Generation, text: str) -> None:
        nodes = self._rollout.nodes
        parent = None if turn.is_fork or not nodes else len(nodes) - 1
        for message, span in zip(turn.span_messages, turn.spans, strict=True):
            nodes.append(Node(parent=parent, role=message["role"], content=message["content"], token_ids=span))
            parent = len(nodes) - 1
        nodes.append(
            Node(
                parent=parent,
                role="assistant",
                content=text,
                token_ids=np.concatenate([turn.generation_prompt, generation.token_ids]).astype(np.int32),
                sampled=True,
                logprobs=generation.logprobs,
                versions=generation.versions,
                num_sampled=len(generation.token_ids),
                temperature=self._sampling.temperature,
                finish_reason=str(generation.finish_reason),
            )
        )
        self._rollout.metrics["forks"] = float(sum(node.parent is None for node in nodes) - 1)

    def _until_stop_string(self, text: str) -> str:
        cuts = [text.find(stop) for stop in self._sampling.stop if stop in text]
        return text[: min(cuts)] if cuts else text


def _check(generation: Generation, request: GenerateRequest) -> None:
    """Refuse an answer that cannot be trained on: a token without a logprob is an error, never a logprob of 0."""
    lengths = {name: len(getattr(generation, name)) for name in ("token_ids", "logprobs", "versions")}
    if len(set(lengths.values())) != 1:
        raise EngineError(f"request {request.request_id!r}: the endpoint's arrays differ in length: {lengths}")
    if not np.isfinite(generation.logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(generation.logprobs))[0])
        raise EngineError(
            f"request {request.request_id!r}: the logprob of sampled token {position} is {float(generation.logprobs[position])!r}, "
            "expected a finite number"
        )
    if generation.finish_reason is FinishReason.CANCELLED:
        raise EngineError(f"request {request.request_id!r} was cancelled after {lengths['token_ids']} tokens")
