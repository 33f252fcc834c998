"""A taskset of verifiers as an environment: its harness talks to the policy, and every token is recorded.

In: a `World`, which lists tasks and plays episodes. Out: an `Environment`. Episodes run in a thread of their own, since the code of a
taskset may block; each names its requests by the id of its trace, and the `Gateway` has them answered by the rollout's session, like an
agent's. The tokens of the rollout are those that the policy saw and sampled; reward, metrics and errors are verifiers'.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from jaxrl.blame import in_words
from jaxrl.config.env import VerifiersEnvConfig, env_name
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Demonstration, Outcome, Session, TaskSpec, checked_tasks
from jaxrl.envs.deadline import waiting_its_turn
from jaxrl.envs.gateway.attending import Unheeded, attended
from jaxrl.envs.gateway.server import Gateway
from jaxrl.envs.gateway.talk import Talk
from jaxrl.envs.verifiers.loops import LoopThread
from jaxrl.envs.verifiers.package import load_world
from jaxrl.envs.verifiers.verdicts import Verdict, outcome_of
from jaxrl.errors import EnvError

SERVE_S = 120.0
"""How long what all episodes share, such as servers of tools, may take to start."""
PATIENCE_S = 1.0
"""How long a cancelled episode may take to withdraw its requests; verifiers logs each that is refused."""


class World(Protocol):
    """A taskset with its harness, as verifiers plays it. Everything but `specs` is called in one event loop."""

    specs: Sequence[TaskSpec]
    """Its tasks, each with its place as `index`."""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Hold what episodes share; they are played inside."""
        ...

    async def play(self, index: int, base_url: str, headers: dict[str, str], minted: Callable[[str], None]) -> Verdict:
        """Play one episode.

        Args:
          index: which task.
          base_url: where the policy answers.
          headers: what each request must bring, beside the id of its trace as `X-Session-ID`.
          minted: called with the id of each trace before anything is asked in it.
        """
        ...


class VerifiersEnvironment:
    """Play a taskset.

    Args:
      name: name in metrics and logs.
      world: the taskset.
      budget: when the harness's requests are refused.
      max_sessions: episodes at the same time; None for any number.
      capacity_deadline_s: how long an episode waits for its turn, in seconds.
      clock: seconds.
    """

    def __init__(
        self,
        name: str,
        world: World,
        *,
        budget: BudgetConfig | None = None,
        max_sessions: int | None = None,
        capacity_deadline_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._world = world
        self._tasks = checked_tasks(name, world.specs)
        self._budget = budget or BudgetConfig()
        self._room = None if max_sessions is None else asyncio.Semaphore(max_sessions)
        self._capacity_deadline_s = capacity_deadline_s
        self._clock = clock
        self._gateway = Gateway()
        self._thread = LoopThread(f"verifiers {name}")
        self._unheeded = Unheeded(name, "harness")
        self._holder: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs in their order."""
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return None: tasksets hold no replies."""
        del spec
        return None

    def close(self) -> None:
        """Stop what episodes share, the thread and the server. May be called twice."""
        self._thread.close(self._stop_serving)
        self._gateway.close()

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Play one task to its end.

        Raises:
          Exception: what the policy failed with, whatever the harness made of it; else see `verdicts.outcome_of`.
        """
        talk = Talk(session, self._budget, warn=self._unheeded, clock=self._clock)
        base_url, api_key = self._gateway.open(talk.answer)
        episode = functools.partial(self._episode, spec["index"], base_url, functools.partial(self._gateway.name, api_key))
        program = self._thread.run(episode) if self._room is None else self._in_turn(episode, self._room)
        try:
            task = await attended(program, talk, name=f"episode of env {self.name!r}", patience_s=PATIENCE_S)
        finally:
            self._gateway.shut(api_key)
        if task.cancelled():
            raise EnvError(f"env {self.name!r}: the episode was cancelled by what it awaited itself")
        return outcome_of(task.result(), talk, f"env {self.name!r}")

    async def _in_turn(self, episode: Callable[[], Awaitable[Verdict]], room: asyncio.Semaphore) -> Verdict:
        """Play an episode when there is room; until then the clock of the rollout stands still."""
        loop, has_room = asyncio.get_running_loop(), asyncio.Event()

        async def play() -> Verdict:
            try:
                async with asyncio.timeout(self._capacity_deadline_s):
                    await room.acquire()
            except TimeoutError as error:
                raise EnvError(
                    f"env {self.name!r}: it was not this rollout's turn after `capacity_deadline_s`={self._capacity_deadline_s:g} s; raise "
                    "that, or `max_sessions`"
                ) from error
            try:
                loop.call_soon_threadsafe(has_room.set)
                return await episode()
            finally:
                room.release()

        playing, waiting = asyncio.create_task(self._thread.run(play)), asyncio.create_task(has_room.wait())
        try:
            with waiting_its_turn():
                await asyncio.wait({playing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            playing.cancel()
            await asyncio.wait({playing})  # not for long: see `LoopThread.run`
            raise
        finally:
            waiting.cancel()
        return await playing

    # In the thread

    async def _episode(self, index: int, base_url: str, name: Callable[[str], None]) -> Verdict:
        await self._start_serving()
        is_named = False

        def minted(trace_id: str) -> None:
            # A second conversation would be recorded as part of the first; it gets no answer, and the verdict says why.
            nonlocal is_named
            if not is_named:
                name(trace_id)
                is_named = True

        return await self._world.play(index, base_url, self._gateway.shared_headers(), minted)

    async def _start_serving(self) -> None:
        """Start what episodes share, with the first of them; where that failed, the next one tries again."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._serve(self._started))
        started = self._started
        try:
            async with asyncio.timeout(SERVE_S):
                await asyncio.shield(started)
        except TimeoutError as error:
            await self._stop_serving()
            raise EnvError(f"env {self.name!r}: what its episodes share was not started after {SERVE_S:g} s") from error

    async def _serve(self, started: asyncio.Future[None]) -> None:
        """Hold what episodes share until this task is cancelled."""
        try:
            async with self._world.serving():
                started.set_result(None)
                await asyncio.Event().wait()
        except (Exception, SystemExit) as error:
            failure = EnvError(f"env {self.name!r}: what its episodes share failed to start or to stop: {in_words(error)}")
            failure.__cause__ = error
            if not started.done():
                started.set_exception(failure)
                started.exception()  # whoever waits looks at it; if nobody does, it is not to be logged
        finally:
            if self._started is started:
                self._started = None
            started.cancel()

    async def _stop_serving(self) -> None:
        holder, self._holder, self._started = self._holder, None, None
        if holder is not None:
            holder.cancel()
            await asyncio.wait({holder})


def verifiers_environment(config: VerifiersEnvConfig) -> VerifiersEnvironment:
    """Load the taskset, and build the environment.

    Raises:
      ConfigError: see `package.load_world`; or two tasks have one key.
    """
    return VerifiersEnvironment(
        env_name(config),
        load_world(config),
        budget=config.budget,
        max_sessions=config.max_sessions,
        capacity_deadline_s=config.capacity_deadline_s,
    )
