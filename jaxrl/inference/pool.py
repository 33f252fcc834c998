"""One policy behind several endpoints: routing, weight updates, and holding a version still.

In: endpoints that serve the same policy, requests, the number of each newly published version. Out: generations, and
`version`, which changes only after every endpoint has taken the new weights. A request goes to the endpoint with the
fewest outstanding ones; a failed request is not sent anywhere else: whoever asked decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import numpy as np

from jaxrl.errors import DeadlineError, EngineError, JaxrlError
from jaxrl.inference.endpoint import NO_VERSION, Endpoint, EndpointHealth, GenerateRequest, Generation, PolicyEndpoint

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Pool(Protocol):
    """Whoever answers a session: the policy (`PolicyPool`), or a frozen model (`frozen.FrozenPool`)."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt; see `PolicyPool.generate` for what it raises."""
        ...

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return [L] float32 logprobs of [L] tokens, each given those before it; index 0 is 0.0."""
        ...

    async def health(self) -> list[EndpointHealth]:
        """Ask every endpoint; one that does not answer is reported as not ready."""
        ...

    async def close(self) -> None:
        """Give back what the endpoints hold."""
        ...


class PolicyPool:
    """The policy, as everything above the endpoints sees it. Used from one event loop.

    Args:
      endpoints: at least one, all serving policy `version`.
      version: the policy version that they serve now.
      update_deadline_s: how long one stage of an update (pause, load, resume) may take, in seconds.
    """

    def __init__(self, endpoints: Sequence[PolicyEndpoint], version: int, *, update_deadline_s: float = 600.0) -> None:
        if not endpoints:
            raise ValueError("a policy pool needs at least one endpoint, got none")
        self._endpoints = tuple(endpoints)
        self._outstanding = [0] * len(self._endpoints)
        self._version = version
        self._newest_asked = version
        self._update_deadline_s = update_deadline_s
        self._updating = asyncio.Lock()
        self._swapping = asyncio.Lock()
        self._holders: dict[object, tuple[str, float]] = {}
        self._released = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that every endpoint serves; never ahead of any of them."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt on the endpoint with the fewest outstanding requests.

        Raises:
          PromptTooLongError, DeadlineError: as the endpoint raised them.
          EngineError: the endpoint refused or lost the request, or failed in any other way.
        """
        return await self._on_least_loaded("generate", lambda endpoint: endpoint.generate(request))

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return [L] float32 logprobs of [L] tokens under the policy, 0.0 for the first; raises as `generate` does."""
        return await self._on_least_loaded("score", lambda endpoint: endpoint.score(token_ids, temperature))

    async def update(self, version: int) -> None:
        """Let every endpoint take published policy `version`: pause all, load all, resume all, then announce it.

        Returns once `self.version >= version`. Concurrent updates run one at a time and never go backwards: whoever is
        first takes the newest version that was asked for, the others find it done. Waits for holders of the version
        that is served (`hold_version`) up to their deadlines. If a stage fails, the endpoints are resumed and the
        announced version stays.

        Raises:
          EngineError: an endpoint failed.
          DeadlineError: a stage ran past `update_deadline_s`.
        """
        self._newest_asked = max(self._newest_asked, version)
        async with self._updating:
            if self._version >= version:
                return
            await self._wait_for_holders()
            async with self._swapping:
                target = self._newest_asked
                try:
                    await self._on_all("pause", lambda endpoint: endpoint.pause())
                    await self._on_all(f"load of version {target}", lambda endpoint: endpoint.load(target))
                finally:
                    await self._on_all("resume", lambda endpoint: endpoint.resume())
                self._version = target

    @asynccontextmanager
    async def hold_version(self, holder: str = "evaluation", deadline_s: float = 600.0) -> AsyncIterator[int]:
        """Keep the served version still for the body of the `async with`; gives that version.

        An update that comes meanwhile waits until nobody holds, but no longer than the deadlines of those who held when
        it began to wait: then it goes ahead, and a warning names who still holds. Holds may be nested, and cannot
        starve updates.

        Args:
          holder: who holds, for the warning.
          deadline_s: how long an update may be kept waiting by this hold, in seconds from now.
        """
        key = object()
        async with self._swapping:
            self._holders[key] = (holder, asyncio.get_running_loop().time() + deadline_s)
            version = self._version
        try:
            yield version
        finally:
            del self._holders[key]
            self._released.set()

    async def health(self) -> list[EndpointHealth]:
        """Ask every endpoint; one that does not answer is reported as not ready."""
        return await health_of_all(self._endpoints)

    async def close(self) -> None:
        """Close every endpoint, also when one of them fails to close; then raise the first failure."""
        await self._on_all("close", lambda endpoint: endpoint.close())

    async def _on_least_loaded(self, what: str, call: Callable[[PolicyEndpoint], Awaitable[T]]) -> T:
        index = min(range(len(self._endpoints)), key=self._outstanding.__getitem__)
        self._outstanding[index] += 1
        try:
            return await call(self._endpoints[index])
        except JaxrlError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed on endpoint {index}: {type(error).__name__}: {error}") from error
        finally:
            self._outstanding[index] -= 1

    async def _on_all(self, what: str, call: Callable[[PolicyEndpoint], Awaitable[None]]) -> None:
        """Run one stage on all endpoints at once, wait for every one of them, then raise the first failure."""
        try:
            async with asyncio.timeout(self._update_deadline_s):
                outcomes = await asyncio.gather(*(call(endpoint) for endpoint in self._endpoints), return_exceptions=True)
        except TimeoutError as error:
            raise DeadlineError(
                f"policy pool: {what} on {len(self._endpoints)} endpoint(s) took more than {self._update_deadline_s:g} s"
            ) from error
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, JaxrlError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise EngineError(f"{what} failed on endpoint {index}: {type(outcome).__name__}: {outcome}") from outcome

    async def _wait_for_holders(self) -> None:
        if not self._holders:
            return
        until = max(deadline for _, deadline in self._holders.values())
        try:
            async with asyncio.timeout_at(until):
                while self._holders:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            logger.warning(
                "policy version %d has been held past its deadline by %s; version %d is loaded now, so the rest of that work runs on it",
                self._version,
                ", ".join(sorted({holder for holder, _ in self._holders.values()})),
                self._newest_asked,
            )


async def health_of_all(endpoints: Sequence[Endpoint]) -> list[EndpointHealth]:
    """Ask every endpoint at once; one that does not answer is reported as not ready, and logged."""
    answers = await asyncio.gather(*(endpoint.health() for endpoint in endpoints), return_exceptions=True)
    healths = []
    for answer in answers:
        if isinstance(answer, BaseException):
            logger.warning("an endpoint does not answer `health`: %r", answer)
            answer = EndpointHealth(is_ready=False, version=NO_VERSION, problem=repr(answer))
        healths.append(answer)
    return healths
