"""The in-process face of the endpoint protocol: asyncio on one side, the engine's futures on the other.

Each call hands work to the engine from the event loop's thread, wakes the device thread and awaits the future. No array
but the request's own numpy crosses; this file makes no JAX call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from jaxrl.engine.engine import Engine
from jaxrl.engine.slots import SampledTokens
from jaxrl.errors import DeadlineError
from jaxrl.inference.endpoint import EndpointHealth, GenerateRequest, Generation, PromptScores
from jaxrl.weights.memory import WeightStore

DEADLINE_GRACE_S = 5.0
"""How long past the engine's own deadline a client waits for it to say so; longer means the device thread is stuck."""

T = TypeVar("T")


class Wakeable(Protocol):
    """The device thread, as far as a client needs it."""

    def wake(self) -> None:
        """Look for work now."""
        ...


class EmbeddedEndpoint:
    """`inference.endpoint.PolicyEndpoint` over an engine in this process."""

    def __init__(self, engine: Engine, device: Wakeable, weight_store: WeightStore) -> None:
        """Connect.

        Args:
          engine: the engine; the device thread ticks it.
          device: what is woken after each request.
          weight_store: where `load` finds published versions.
        """
        self._engine = engine
        self._device = device
        self._weight_store = weight_store
        self._live: set[str] = set()

    async def generate(self, request: GenerateRequest, on_tokens: Callable[[SampledTokens], None] | None = None) -> Generation:
        """See `Endpoint.generate`.

        Args:
          request: prompt and settings.
          on_tokens: called in the event loop with the tokens of each tick, the last ones before this returns.
        """
        tell = None if on_tokens is None else partial(_tell, asyncio.get_running_loop(), on_tokens)
        deadline_s = self._engine.config.request_deadline_s + DEADLINE_GRACE_S
        self._live.add(request.request_id)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._await(self._engine.submit(request, tell))
        except asyncio.CancelledError:
            self._cancel(request.request_id)
            raise
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            self._cancel(request.request_id)
            raise DeadlineError(
                f"request {request.request_id!r} got no answer within {deadline_s:g} s: the device thread is busy or stuck; "
                f"{self._engine.describe()}"
            ) from error
        finally:
            self._live.discard(request.request_id)

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `Endpoint.score`."""
        return await self._await_score(self._engine.score(token_ids, temperature), len(token_ids))

    async def score_with_top(self, token_ids: np.ndarray, temperature: float = 1.0, *, num_top: int) -> PromptScores:
        """Do what `score` does, with `num_top` alternatives per token; see `Engine.score_with_top`."""
        return await self._await_score(self._engine.score_with_top(token_ids, temperature, num_top=num_top), len(token_ids))

    async def _await_score(self, future: Future[T], num_tokens: int) -> T:
        deadline_s = self._engine.config.request_deadline_s + DEADLINE_GRACE_S
        try:
            async with asyncio.timeout(deadline_s):
                return await self._await(future)
        except TimeoutError as error:
            raise DeadlineError(
                f"the score of {num_tokens} tokens did not come within {deadline_s:g} s: the device thread is busy or stuck; "
                f"{self._engine.describe()}"
            ) from error

    async def pause(self) -> None:
        """See `PolicyEndpoint.pause`."""
        await self._await(self._engine.pause())

    async def resume(self) -> None:
        """See `PolicyEndpoint.resume`."""
        await self._await(self._engine.resume())

    async def load(self, version: int) -> None:
        """See `PolicyEndpoint.load`."""
        await self._await(self._engine.load(self._weight_store.get(version), version))

    async def health(self) -> EndpointHealth:
        """See `Endpoint.health`."""
        stats = self._engine.stats()
        return EndpointHealth(
            is_ready=self._engine.failure is None,
            version=self._engine.version,
            num_running=int(stats["running"]),
            num_waiting=int(stats["waiting"]),
            detail=stats,
        )

    async def close(self) -> None:
        """See `Endpoint.close`."""
        for request_id in list(self._live):
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._device.wake()

    async def _await(self, future: Future[T]) -> T:
        self._device.wake()
        return await asyncio.wrap_future(future)


def _tell(loop: asyncio.AbstractEventLoop, on_tokens: Callable[[SampledTokens], None], tokens: SampledTokens) -> None:
    """Call `on_tokens` in the event loop, from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop may have closed; then no one listens any more
        loop.call_soon_threadsafe(on_tokens, tokens)
