"""A model that is never trained, behind one or several servers: a teacher, or a source of rollouts.

In: endpoints that serve the same frozen model, requests, sequences to score. Out: generations and scores, from the
healthy endpoint with the fewest outstanding requests. An endpoint that is down, or lets a request run past its deadline,
is left alone for a while and then probed; what it could not take goes to another one. There is no policy version: the
tokens' is `NO_VERSION`, and nothing ever goes stale. No cache salt is sent: prefixes of a frozen model stay valid.

| what waits                              | for what                     | ends by                                              |
|-----------------------------------------|------------------------------|------------------------------------------------------|
| `setup`                                 | every endpoint to be ready   | its deadline                                         |
| a request                               | one of the places            | those who hold them, who have deadlines              |
| a request with a place                  | an answer                    | `timeout_s`                                          |
| a request, when every endpoint is down  | the next probe of each       | `cool_down_s`, then the error that names all of them |
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from jaxrl.config.model import FrozenModelConfig
from jaxrl.errors import ConfigError, DeadlineError, EndpointDownError, EngineError, JaxrlError
from jaxrl.inference.endpoint import ChatReply, ChatRequest, Endpoint, EndpointHealth, GenerateRequest, Generation
from jaxrl.inference.http import HttpEndpoint
from jaxrl.inference.pool import health_of_all
from jaxrl.inference.wire import check_key

logger = logging.getLogger(__name__)

COOL_DOWN_S = 15.0
"""How long an endpoint that failed is left alone before it is probed."""
SETUP_PAUSE_S = 1.0
"""Between two looks at a server that is still starting."""
DEADLINE_GRACE_S = 1.0
"""How much longer than its endpoints the pool waits for the end of a call."""
T = TypeVar("T")


class FrozenEndpoint(Endpoint, Protocol):
    """An endpoint that can say which model it serves, and what that model's tokenizer does."""

    async def tokenize(self, text: str) -> np.ndarray | None:
        """Return [n] int32 ids of a text, none added around it; None if the server does not tell."""
        ...

    async def detokenize(self, token_ids: np.ndarray) -> str | None:
        """Return the text of ids, special tokens included; None if the server does not tell."""
        ...

    async def probe(self) -> int | None:
        """Return the model; raise `EndpointDownError` if there is no answer, another `EngineError` if the answer is no."""
        ...

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation in words; raise as `generate` does."""
        ...


@dataclass(slots=True)
class _EndpointState:
    """One endpoint and what is known of it."""

    name: str
    endpoint: FrozenEndpoint
    num_outstanding: int = 0
    failure: str = ""
    """Why it is left alone; empty while it is healthy."""
    probe_at: float = 0.0
    """When it may be probed, on the pool's clock."""


class FrozenPool:
    """The frozen model, as everything above the endpoints sees it. Used from one event loop.

    Args:
      name: the model, for messages.
      endpoints: at least one, by the name that messages give it.
      max_concurrency: requests in flight at the same time; further ones wait.
      timeout_s: deadline of a request once it has a place, whichever endpoints have a try at it.
      ready_deadline_s: how long `setup` waits, unless it is told otherwise.
      cool_down_s: how long an endpoint that failed is left alone.
      clock: monotonic time in seconds.
    """

    def __init__(
        self,
        name: str,
        endpoints: Mapping[str, FrozenEndpoint],
        *,
        max_concurrency: int = 64,
        timeout_s: float = 600.0,
        ready_deadline_s: float = 60.0,
        cool_down_s: float = COOL_DOWN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not endpoints:
            raise ValueError("a frozen pool needs at least one endpoint, got none")
        self.name = name
        self.window: int | None = None
        """Prompt plus completion tokens that every endpoint can hold; None before `setup`, or if none says."""
        self._endpoints = tuple(_EndpointState(name, endpoint) for name, endpoint in endpoints.items())
        self._places = asyncio.Semaphore(max_concurrency)
        self._timeout_s = timeout_s
        self._ready_deadline_s = ready_deadline_s
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._probes: dict[str, asyncio.Task[None]] = {}

    def __str__(self) -> str:
        return f"frozen model {self.name!r} at {', '.join(state.name for state in self._endpoints)}"

    async def setup(self, *, window: int | None = None, scored_ids: np.ndarray | None = None, deadline_s: float | None = None) -> None:
        """Wait until every endpoint is ready, and check that it can do what will be asked of it.

        Args:
          window: the longest sequence that will be sent, if known.
          scored_ids: [L] int32, a few ids that are scored once on each endpoint, for a pool that will be asked to score;
            their windows must then be longer by one, because a server also samples a token after what it scores.
          deadline_s: for all of it, in seconds; None takes the pool's own.

        Raises:
          EngineError: an endpoint answers, but does not serve the model, refuses the key or cannot score.
          ConfigError: the window of an endpoint is too short.
          DeadlineError: an endpoint is not ready by the deadline.
        """
        deadline_s = self._ready_deadline_s if deadline_s is None else deadline_s
        waiting = {state.name: "it has not answered" for state in self._endpoints}

        async def prepare(state: _EndpointState) -> int | None:
            while True:
                try:
                    window = await state.endpoint.probe()
                    if scored_ids is not None:
                        waiting[state.name] = f"it has not scored {len(scored_ids)} tokens"
                        await state.endpoint.score(scored_ids)
                    del waiting[state.name]
                    return window
                except EndpointDownError as error:
                    waiting[state.name] = str(error)
                    await asyncio.sleep(SETUP_PAUSE_S)

        timer = asyncio.timeout(deadline_s)
        try:
            async with timer, asyncio.TaskGroup() as group:
                tasks = [group.create_task(prepare(state)) for state in self._endpoints]
        except TimeoutError as error:
            if not timer.expired():
                raise
            states = "; ".join(f"{name}: {state}" for name, state in waiting.items())
            late = f"was not ready within {deadline_s:g} s (`ready_deadline_s`)"
            raise DeadlineError(f"frozen model {self.name!r} {late}: {states}") from error
        except ExceptionGroup as group_error:
            raise _first_of_ours(group_error) from group_error
        windows = {state.name: task.result() for state, task in zip(self._endpoints, tasks, strict=True)}
        told = {name: size for name, size in windows.items() if size is not None}
        self.window = min(told.values(), default=None)
        needed = (window or 0) + (scored_ids is not None)
        for name, size in told.items():
            if size < needed:
                sampled = "" if scored_ids is None else f" ({window or 0} to score, and one that the server samples after them)"
                raise ConfigError(
                    f"frozen model {self.name!r}: {name} holds sequences of {size} tokens, and some may have {needed}{sampled}; "
                    "serve it with a longer window, or shorten prompts and replies"
                )

    @property
    def endpoints(self) -> dict[str, FrozenEndpoint]:
        """The endpoints by name."""
        return {state.name: state.endpoint for state in self._endpoints}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt.

        Raises:
          PromptTooLongError, DeadlineError: as the endpoint raised them.
          EngineError: the request was refused, its answer cannot be used, or every endpoint is down.
        """
        return await self._on_healthy("generate", lambda endpoint: endpoint.generate(request))

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation in words, for a model whose tokens mean nothing to the policy; raises as `generate` does."""
        return await self._on_healthy("chat", lambda endpoint: endpoint.chat(request))

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return [L] float32 logprobs of [L] tokens under the frozen model, 0.0 for the first; raises as `generate` does."""
        return await self._on_healthy("score", lambda endpoint: endpoint.score(token_ids, temperature))

    async def health(self) -> list[EndpointHealth]:
        """Ask every endpoint; one that does not answer is reported as not ready."""
        return await health_of_all([state.endpoint for state in self._endpoints])

    async def close(self) -> None:
        """End the probes and close every endpoint, also when one of them fails to close; then raise the first failure."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        outcomes = await asyncio.gather(*(state.endpoint.close() for state in self._endpoints), return_exceptions=True)
        for state, outcome in zip(self._endpoints, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise EngineError(f"close failed on {state.name}: {type(outcome).__name__}: {outcome}") from outcome

    async def _on_healthy(self, what: str, call: Callable[[FrozenEndpoint], Awaitable[T]]) -> T:
        async with self._places:
            # An endpoint ends its calls itself, and says more of them; this is for calls that several had a try at.
            timer = asyncio.timeout(self._timeout_s + DEADLINE_GRACE_S)
            try:
                async with timer:
                    while True:
                        state = await self._choose(what)
                        answer = await self._try(what, state, call)
                        if answer is not None:
                            return answer
            except TimeoutError as error:
                if not timer.expired():
                    raise
                raise DeadlineError(
                    f"frozen model {self.name!r}: {what} got no answer within {self._timeout_s:g} s; {self._states()}"
                ) from error

    async def _try(self, what: str, state: _EndpointState, call: Callable[[FrozenEndpoint], Awaitable[T]]) -> T | None:
        """Return what one endpoint answers, or None if it is down."""
        state.num_outstanding += 1
        try:
            return await call(state.endpoint)
        except EndpointDownError as error:
            self._leave_alone(state, str(error))
            return None
        except DeadlineError as error:
            self._leave_alone(state, str(error))
            raise
        except JaxrlError:
            raise
        except Exception as error:
            raise EngineError(f"{what} failed on {state.name}: {type(error).__name__}: {error}") from error
        finally:
            state.num_outstanding -= 1

    async def _choose(self, what: str) -> _EndpointState:
        """Return the healthy endpoint with the fewest outstanding requests; with none, wait for the probes."""
        for state in self._endpoints:
            if state.failure and self._clock() >= state.probe_at:
                self._probe(state)
        probes: set[asyncio.Task[None]] | None = None
        while True:
            healthy = [state for state in self._endpoints if not state.failure]
            if healthy:
                return min(healthy, key=lambda state: state.num_outstanding)
            if probes is None:
                probes = {self._probe(state) for state in self._endpoints}
            if not probes:
                raise EngineError(f"frozen model {self.name!r}: {what} has nowhere to go, every endpoint is down: {self._states()}")
            _, probes = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)

    def _states(self) -> str:
        return "; ".join(f"{state.name}: {state.failure or 'well'}" for state in self._endpoints)

    def _leave_alone(self, state: _EndpointState, failure: str) -> None:
        if not state.failure:
            num, left = len(self._endpoints), sum(not other.failure for other in self._endpoints) - 1
            who = f"{left} of {num} servers are left to take its requests" if left else "requests wait"
            logger.warning(
                "frozen model %r: %s does not answer: %s; %s; it is asked again every %g s",
                self.name, state.name, failure, who, self._cool_down_s,
            )  # fmt: skip
        state.failure, state.probe_at = failure, self._clock() + self._cool_down_s

    def _probe(self, state: _EndpointState) -> asyncio.Task[None]:
        """Return the probe of an endpoint, begun now if there is none: it waits for the cool-down to pass."""
        task = self._probes.get(state.name)
        if task is None or task.done():
            task = self._probes[state.name] = asyncio.create_task(self._look_again(state))
        return task

    async def _look_again(self, state: _EndpointState) -> None:
        await asyncio.sleep(max(0.0, state.probe_at - self._clock()))
        try:
            await state.endpoint.probe()
        except Exception as error:
            self._leave_alone(state, str(error) or type(error).__name__)
        else:
            state.failure = ""
            logger.warning("frozen model %r: %s answers again", self.name, state.name)


def connect_frozen_pool(config: FrozenModelConfig, environ: Mapping[str, str] = os.environ) -> FrozenPool:
    """Build the pool of a configured frozen model; nothing is sent before `FrozenPool.setup`.

    Args:
      config: name, servers and limits.
      environ: where the key is looked up.

    Raises:
      ConfigError: the variable that holds the key is not set, or its key cannot be sent.
    """
    key = api_key(config.api_key_var, environ)
    endpoints = {
        url: HttpEndpoint(
            url,
            config.name,
            api_key=key,
            api_key_var=config.api_key_var,
            timeout_s=config.timeout_s,
            max_attempts=config.max_attempts,
            max_connections=config.max_concurrency,
        )
        for url in config.base_url
    }
    return FrozenPool(
        config.name,
        endpoints,
        max_concurrency=config.max_concurrency,
        timeout_s=config.timeout_s,
        ready_deadline_s=config.ready_deadline_s,
    )


def api_key(variable: str | None, environ: Mapping[str, str], setting: str = "api_key_var") -> str | None:
    """Return the key that a variable holds; None if no variable is named.

    Args:
      variable: the name of the variable.
      environ: where it is looked up, such as `os.environ`.
      setting: the key of the configuration that names it, for messages.

    Raises:
      ConfigError: it is not set, or empty, or its key cannot be sent.

    Example:
      >>> api_key("TEACHER_KEY", {})
      Traceback (most recent call last):
      jaxrl.errors.ConfigError: `api_key_var`='TEACHER_KEY': the environment variable TEACHER_KEY is not set or empty; put the key into it
    """
    if variable is None:
        return None
    key = environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"`{setting}`={variable!r}: the environment variable {variable} is not set or empty; put the key into it")
    check_key(key, f"in the environment variable {variable}")
    return key


def _first_of_ours(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first exception that was raised on purpose, or else the first one."""
    ours, _ = group.split(JaxrlError)
    found: BaseException = ours or group
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Exception)
    return found
