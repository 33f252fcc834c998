"""Opens and closes what the environments of a run connect to: frozen models that play or judge.

In: the environments. Out: all of them set up, before the first rollout, or none; in the end every pool that they took on closed.
The policy's pool is nobody's here: it belongs to whoever started the run. What no waiting can mend is found by a probe, for which
no policy need be served.

    who waits      for what                                            unblocked by            bounded by
    the probe      every sampler and every algorithm, all at once      the models' servers     `PROBE_DEADLINE_S`
    the set-up     the same                                            the same                its deadline; the run being stopped
    the close      every pool, all at once                             the pools               `CLOSE_DEADLINE_S` for each
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxrl.blame import causes_of, failing_in
from jaxrl.errors import DeadlineError, EndpointDownError, EngineError, RunFailedError
from jaxrl.inference import vocabulary
from jaxrl.inference.endpoint import EndpointHealth, GenerateRequest, Generation
from jaxrl.orchestrator.algo import Algorithm
from jaxrl.orchestrator.ports import ConnectedPool
from jaxrl.orchestrator.sampler import Sampler, TrainEnv

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at who is still being waited for, and whether the run is to stop."""
PROBE_DEADLINE_S = 5.0
"""How long a probe waits for a server: it holds up a start whose servers come later."""
CLOSE_DEADLINE_S = 10.0
"""How long a pool may take to close."""


class UnservedPolicy:
    """In place of the policy's pool while no policy is served; whoever asks it is told so."""

    version = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Refuse."""
        raise _NotServedError(f"request {request.request_id!r}: no policy is served yet")

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Refuse."""
        raise _NotServedError(f"{len(token_ids)} tokens to be scored at temperature {temperature:g}: no policy is served yet")

    async def health(self) -> list[EndpointHealth]:
        """Return nothing: there is no endpoint."""
        return []

    async def close(self) -> None:
        """Do nothing."""


class _NotServedError(EngineError):
    """No policy is served yet."""


async def probe(envs: Sequence[TrainEnv]) -> None:
    """Set environments up once, all at the same time, to find what no waiting can mend; then close what they took on.

    A server that does not answer in time is only warned of: it may start while the run compiles. An algorithm that asks the policy, which
    need not be served, is taken for ready.

    Args:
      envs: environments that are used for nothing else.

    Raises:
      JaxrlError: the first failure, in the order of the environments.
    """
    parts = [(env.name, part) for env in envs for part in (env.sampler, env.algorithm)]
    try:
        with _set_up_says_it(vocabulary.logger):
            outcomes = await asyncio.gather(*(_is_ready(*part) for part in parts), return_exceptions=True)
    finally:
        await close_all(envs)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    for name in dict.fromkeys(_names([part]) for part, is_ready in zip(parts, outcomes, strict=True) if not is_ready):
        words = "%s is not ready within %g s; the run waits for it after compiling, up to its `ready_deadline_s`"
        logger.warning(words, name, PROBE_DEADLINE_S)


async def set_up(envs: Sequence[TrainEnv], *, deadline_s: float, show: Callable[[str], None], is_stopping: Callable[[], bool]) -> None:
    """Set every sampler and every algorithm up at once; the first failure cancels the others.

    Returns early, with what was not ready cancelled, if the run is to stop.

    Args:
      envs: the environments.
      deadline_s: `orchestrator.wait_deadline_s`, for all of them together.
      show: called with whom is being waited for, and with the empty string once nobody is.
      is_stopping: asked now and then.

    Raises:
      DeadlineError: not everything was ready in time; says what was not.
      ExceptionGroup: what failed, the first failure first.
    """
    timer = asyncio.timeout(deadline_s)
    pending: dict[asyncio.Task[None], tuple[str, Sampler | Algorithm]] = {}
    try:
        async with timer, asyncio.TaskGroup() as group:
            for env in envs:
                for part in (env.sampler, env.algorithm):
                    task = group.create_task(_set_up_part(env.name, part), name=f"set-up of env {env.name!r}")
                    pending[task] = env.name, part
            while pending:
                done, _ = await asyncio.wait(pending, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    part = pending.pop(task)
                    if task.cancelled():  # by somebody else: a task group would take no notice
                        raise RunFailedError(f"setting up {_names([part])} was cancelled by something that it awaited")
                if pending and is_stopping():
                    for task in pending:
                        task.cancel()
                    break
                if pending and not done:
                    show(f"waiting for {_names(pending.values())}")
    except TimeoutError as error:
        if not timer.expired():
            raise
        names = _names(pending.values())
        raise DeadlineError(
            f"the environments were not set up within {deadline_s:g} s (`orchestrator.wait_deadline_s`): still waiting for {names}"
        ) from error
    finally:
        show("")


async def close_all(envs: Sequence[TrainEnv]) -> None:
    """Close every pool that a sampler or an algorithm took on; one that fails to close is logged and keeps no other open."""
    pools: list[ConnectedPool] = []
    for env in envs:
        pools += [*env.sampler.connected_pools, *env.algorithm.connected_pools]
    await asyncio.gather(*map(_close, pools))


@contextlib.contextmanager
def _set_up_says_it(log: logging.Logger) -> Iterator[None]:
    """Keep a logger silent: the set-up proper will say the same, and once will do."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


async def _is_ready(env_name: str, part: Sampler | Algorithm) -> bool:
    """Return whether a part could be set up by now; raise what is wrong with it, but for the policy that is missing."""
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            await _set_up_part(env_name, part)
    except (TimeoutError, EndpointDownError):
        return False
    except Exception as error:
        if not any(isinstance(cause, _NotServedError) for cause in causes_of(error)):
            raise
    return True


async def _set_up_part(env_name: str, part: Sampler | Algorithm) -> None:
    with failing_in(f"environment {env_name!r}"):
        await part.setup()


async def _close(pool: ConnectedPool) -> None:
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await pool.close()
    except Exception as error:
        late = f"it took more than {CLOSE_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        logger.warning("%s did not close: %s", pool, late)


def _names(waiting: Iterable[tuple[str, Sampler | Algorithm]]) -> str:
    """Name the models that are being connected, or else the environment."""
    names = [", ".join(map(str, part.connected_pools)) or f"env {env_name!r}" for env_name, part in waiting]
    return "; ".join(dict.fromkeys(names))
