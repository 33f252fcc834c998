"""An environment behind an OpenEnv server: its tasks come from the Task API, each rollout is one episode over a WebSocket of its own.

In: a server's address, which split, an adapter, a budget. Out: an `Environment`. A task's spec is what the server says of it, with `split`,
`index` and `seed`, which each rollout is reset with: the members of a group play the same. A server without the Task API has tasks of a
seed alone. Its reward is the reward; what it does not score is not scored here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.config.env import OpenEnvConfig, env_name
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Message, TaskSpec, opening
from jaxrl.envs.chat import ChatEnvironment, Episode, Said
from jaxrl.envs.deadline import waiting_its_turn
from jaxrl.envs.hooks import called
from jaxrl.envs.openenv.adapter import Adapter, build_adapter
from jaxrl.envs.openenv.addresses import http_url, shown_url
from jaxrl.envs.openenv.connection import CapacityReachedError, Connection, Observation, finite_number, require_websockets
from jaxrl.envs.openenv.room import Room
from jaxrl.envs.openenv.task_api import SyncTaskAPIClient
from jaxrl.errors import ConfigError, EnvError, EnvUnreachableError, TaskAPIError

logger = logging.getLogger(__name__)

MANY_TASKS = 100_000
"""More than these take so long to list that it is said."""
MAX_MESSAGE_CHARS = 1_000_000
"""A longer message is refused before it is rendered: no policy can read it, and turning it into tokens holds up every other rollout."""
_RESET_KEYS = ("split", "index", "seed")
"""What of a task's spec the server is reset with."""


class OpenEnvEnvironment(ChatEnvironment):
    """Plays the tasks of an OpenEnv server.

    Args:
      name: name in metrics and logs.
      tasks: the task specs, each with an `id` of its own and what of `split`, `index` and `seed` the server is to be reset with.
      base_url: the server.
      adapter: what the policy is told, and what its replies do.
      opening: what stands before the first observation.
      config: the other settings.
      clock: monotonic time in seconds.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        *,
        base_url: str,
        adapter: Adapter,
        opening: Sequence[Message] = (),
        config: OpenEnvConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        budget: BudgetConfig = config.budget
        super().__init__(name, tasks, budget=budget, clock=clock)
        self._base_url = base_url
        self._adapter = adapter
        self._opening = list(opening)
        self._config = config
        self._room = Room(config.max_sessions)
        self._is_full_told = False

    async def reset(self, episode: Episode) -> Said:
        """Return what the policy is told first."""
        return [*self._opening, *await self._messages(episode)]

    async def done(self, episode: Episode) -> bool:
        """Let the reply act, and say whether the episode is over."""
        action = await self._adapted(self._adapter.action, episode.last, episode.spec)
        if not isinstance(action, Mapping):
            raise EnvError(f"env {self.name!r}: `action` must return a dict, got {action!r:.100} of type {type(action).__name__}")
        seen = await episode.state["connection"].step(dict(action))
        self._note(episode, seen)
        return seen.done

    async def reply(self, episode: Episode) -> Said:
        """Return what the policy is told of the last observation."""
        return await self._messages(episode)

    async def score(self, episode: Episode) -> float | None:
        """Return the last reward of a step, or the sum of all; None if no step had one."""
        given = [seen.reward for seen in episode.state["observations"][1:]]  # the first one answers no reply
        rewards = [reward for reward in given if reward is not None]
        if len(rewards) == len(episode.replies):
            episode.turn_rewards = rewards
        if not rewards:
            return None
        return sum(rewards) if self._config.reward_of == "sum" else rewards[-1]

    async def _converse(self, episode: Episode) -> str:
        """Play turns while a session of the server is held, and give it back however they end."""
        connection = await self._open(episode)
        try:
            return await super()._converse(episode)
        finally:
            await self._give_back(connection)

    async def _open(self, episode: Episode) -> Connection:
        """Return a session that is reset to the episode's task; wait where the server has no room."""
        waited_s, refusals = 0.0, 0
        while True:
            waited_s += await self._enter(self._config.capacity_deadline_s - waited_s, refusals)
            connection = None
            try:
                connection = await Connection.open(self._base_url, deadline_s=self._config.request_deadline_s)
                first = await connection.reset({key: episode.spec[key] for key in _RESET_KEYS if key in episode.spec})
                episode.state.update(connection=connection, observations=[])
                self._note(episode, first)
            except CapacityReachedError as error:
                refusals += 1
                self._room.refused()
                self._tell_once(error)
                if connection is not None:
                    await connection.close()  # the server ends such a connection; if it does not, nobody else would
                continue
            except BaseException:
                await self._give_back(connection)
                raise
            self._room.admitted()
            episode.metrics["session_wait_s"] = waited_s
            return connection

    async def _give_back(self, connection: Connection | None) -> None:
        try:
            if connection is not None:
                await connection.close()
        finally:
            self._room.leave()

    async def _enter(self, longest_s: float, refusals: int) -> float:
        """Wait for this rollout's turn to open a session; return for how many seconds."""
        started_s = self._clock()
        try:
            with waiting_its_turn():
                async with asyncio.timeout(max(longest_s, 0.0)):
                    await self._room.enter(again=refusals > 0)
            return self._clock() - started_s
        except TimeoutError:
            raise EnvError(
                f"env {self.name!r}: no session of {shown_url(self._base_url)} was free within `capacity_deadline_s`="
                f"{self._config.capacity_deadline_s:g} s (refused {refusals} times); let the server have more of them "
                "(`max_concurrent_envs`), or wait longer"
            ) from None

    def _tell_once(self, refusal: CapacityReachedError) -> None:
        if not self._is_full_told:
            self._is_full_told = True
            logger.warning("env %r: %s; rollouts wait for their turn (said once)", self.name, refusal)

    def _note(self, episode: Episode, seen: Observation) -> None:
        """Keep an observation, and what it says it has cost."""
        episode.state["observations"].append(seen)
        key = self._config.cost_key
        if (told := seen.metadata.get(key)) is not None:  # null is not told, like a reward
            cost = finite_number(told)
            if cost is None or cost < 0:
                raise EnvError(f"env {self.name!r}: `{key}` of an observation's metadata must be a number from 0 on, got {told!r:.100}")
            episode.metrics[key] = episode.metrics.get(key, 0.0) + cost

    async def _messages(self, episode: Episode) -> Sequence[Message]:
        said = await self._adapted(self._adapter.message, dict(episode.state["observations"][-1].observation), episode.spec)
        messages: Any = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not isinstance(messages, Sequence):
            raise EnvError(f"env {self.name!r}: `message` must return a text or a list of messages, got {said!r:.100}")
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        if (size := sum(len(content) for content in contents if isinstance(content, str))) > MAX_MESSAGE_CHARS:
            raise EnvError(
                f"env {self.name!r}: an observation is shown as {size:,} characters, and {MAX_MESSAGE_CHARS:,} is the most; show one field "
                "of it (`question_key`), or cut it in an adapter of yours (`import_path`)"
            )
        return messages

    async def _adapted(self, method: Callable[..., Any], *args: Any) -> Any:
        what = f"env {self.name!r}: what `{getattr(method, '__name__', method)}` returns"
        return await called(method, *args, what=what, deadline_s=self._hook_deadline_s)


def openenv_environment(config: OpenEnvConfig) -> OpenEnvEnvironment:
    """List the server's tasks and build the environment.

    Raises:
      EnvUnreachableError: nobody answers at `base_url`.
      ConfigError: `websockets` is not installed, the adapter cannot be used, or the server has no such environment, split or tasks.
    """
    name = env_name(config)
    where = f"env {name!r}"
    require_websockets()
    try:
        http_url(config.base_url)
    except ValueError as error:
        raise ConfigError(f"{where}: `base_url`: {error}") from None
    return OpenEnvEnvironment(
        name,
        _tasks(config, where),
        base_url=config.base_url,
        adapter=build_adapter(config, where),
        opening=opening(config.system_prompt, config.examples),
        config=config,
    )


def _tasks(config: OpenEnvConfig, where: str) -> list[TaskSpec]:
    """Return a spec for each task of the split under each seed."""
    with SyncTaskAPIClient(config.base_url, config.server_env, timeout=config.request_deadline_s) as client:
        try:
            if config.num_tasks is None and (total := client.num_tasks(config.split)) > MANY_TASKS:
                logger.warning("%s: all %d tasks of `split`=%r are listed first; `num_tasks` takes fewer", where, total, config.split)
            listed = list(client.iter_tasks(config.split, config.num_tasks))
        except NotImplementedError as error:
            return _tasks_of_seeds(config, where, error)
        except EnvUnreachableError as error:
            raise EnvUnreachableError(f"{where}: `base_url`={shown_url(config.base_url)!r}: {error}") from error
        except (TaskAPIError, IndexError, ValueError) as error:
            known = _splits(client)
            if known and config.split not in known:
                words = f"the server has no `split`={config.split!r}; it has the splits {', '.join(map(repr, known))}"
                raise ConfigError(f"{where}: {words} (asked for its tasks, it said: {error})") from error
            raise ConfigError(f"{where}: the tasks of `split`={config.split!r} cannot be listed: {error}") from error
    if not listed:
        raise ConfigError(f"{where}: `split`={config.split!r} of the server has no tasks")
    return [_spec(config, task, index, seed) for index, task in enumerate(listed) for seed in config.seeds]


def _spec(config: OpenEnvConfig, task: Any, index: int, seed: int) -> TaskSpec:
    """Return the spec of a task under a seed: what the server says of it, and what it is reset with."""
    said = dict(task) if isinstance(task, dict) else {"task": task}
    given = said.get("id")
    identity = f"{config.split}-{index}" if given is None else str(given)
    if len(config.seeds) > 1:
        identity = f"{identity}|s{seed}"
    return {**said, "id": identity, "split": config.split, "index": index, "seed": seed}


def _tasks_of_seeds(config: OpenEnvConfig, where: str, error: NotImplementedError) -> list[TaskSpec]:
    """Return the specs of a server that lists no tasks: one per seed, counted up from the first."""
    if config.num_tasks is None:
        raise ConfigError(
            f"{where}: the server lists no tasks: {error}. Set `num_tasks`: its tasks are then as many seeds, from the first of `seeds` on"
        ) from error
    if len(config.seeds) > 1:
        raise ConfigError(f"{where}: the server lists no tasks, so each task is a seed: give `seeds`={config.seeds} its first one alone")
    logger.info("%s: the server lists no tasks; each of %d tasks is a seed, and `split` is not sent", where, config.num_tasks)
    first = config.seeds[0]
    return [{"id": f"seed-{seed}", "seed": seed} for seed in range(first, first + config.num_tasks)]


def _splits(client: SyncTaskAPIClient) -> list[Any]:
    """Return the names of the splits that there are; none if the server does not say."""
    with contextlib.suppress(NotImplementedError, LookupError, ValueError, EnvError):
        return [split.get("name") for split in client.list_splits()]
    return []
