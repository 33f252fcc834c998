"""The one module that imports `verifiers`, and only when there is a taskset of it: it is loaded, served, and its episodes are played.

In: a `VerifiersEnvConfig`. Out: task specs, and a `Verdict` for each episode. What is imported, and what a taskset does when it is loaded,
is other people's code: whatever it raises is a mistake in the configuration, in words.
"""

from __future__ import annotations

import importlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from jaxrl.blame import in_words
from jaxrl.config.env import VerifiersEnvConfig, env_name
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.hooks import look_in_working_folder
from jaxrl.envs.verifiers.verdicts import Verdict, read_episode
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering.messages import whole_characters

NO_KEY = "JAXRL_HAS_NO_KEY_FOR_VERIFIERS"
"""Name of an environment variable that nobody sets: the gateway's key is a header, and no other key is to be sent to it."""


class PackageWorld:
    """A taskset with its harness.

    Args:
      env: verifiers' `Env`.
      tasks: its tasks.
    """

    def __init__(self, env: Any, tasks: Sequence[Any]) -> None:
        self._env = env
        self._tasks = tasks
        self._contexts: dict[str, Any] = {}
        self.specs: Sequence[TaskSpec] = [spec_of(task, index) for index, task in enumerate(tasks)]

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Hold what episodes share, such as servers of tools."""
        return self._env.serving()

    async def play(self, index: int, base_url: str, headers: dict[str, str], minted: Callable[[str], None]) -> Verdict:
        """Play an episode of a task; see `environment.World`."""
        (slot,) = self._env.slots(self._tasks[index], 1)
        context = self._context(base_url, headers)
        return read_episode(await self._env.run_slot(slot, context, on_trace=lambda trace: minted(trace.id)))

    def _context(self, base_url: str, headers: dict[str, str]) -> Any:
        """Return who answers; always the same for one address, since verifiers keeps a client for each that it is given."""
        vf = importlib.import_module("verifiers.v1")
        if base_url not in self._contexts:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY, headers=headers)
            self._contexts[base_url] = vf.ModelContext(model="policy", client=client)
        return self._contexts[base_url]


def load_world(config: VerifiersEnvConfig) -> PackageWorld:
    """Import a taskset and its harness, and list the tasks.

    Raises:
      ConfigError: verifiers is missing, the taskset or the harness cannot be imported or refuses its settings, has more than one
        agent, or its tasks cannot be listed, are late, or have no end.
    """
    where = f"env {env_name(config)!r}, taskset {config.taskset!r}"
    try:
        vf = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"{where}: an environment of type 'verifiers' needs the package `verifiers`, which cannot be imported ({error}); install it "
            "with `pip install 'jaxrl[verifiers]'`, not beside `openenv`"
        ) from error
    look_in_working_folder()
    try:
        env = vf.load_environment(vf.resolve_env_config(_table(config, vf, where)))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where} cannot be loaded: {in_words(error)}") from error
    if not env.taskset.bounded and config.num_tasks is None:
        raise ConfigError(f"{where} has no end: say how many of its tasks to take, with `num_tasks`")
    tasks = _listed(lambda: itertools.islice(env.taskset, config.num_tasks), config.load_deadline_s, where)
    if not tasks:
        raise ConfigError(f"{where} has no tasks with these `taskset_args`: {config.taskset_args!r}")
    return PackageWorld(env, tasks)


def spec_of(task: Any, index: int) -> TaskSpec:
    """Return a task as a spec: its key, its place and its data, with `difficulty` and `group` beside them if it has some."""
    data = task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})
    marks = {name: data[name] for name in ("difficulty", "group") if _is_mark(data.get(name))}
    return {"id": task.key, "index": index, **marks, "data": _as_json(data)}


def _as_json(value: Any) -> Any:
    """Return a copy without what JSON has no word for: null for NaN and infinity, U+FFFD for half a character. It is for logs alone."""
    match value:
        case dict():
            return {whole_characters(str(key)): _as_json(part) for key, part in value.items()}
        case list():
            return [_as_json(part) for part in value]
        case str():
            return whole_characters(value)
        case float():
            return value if math.isfinite(value) else None
    return value


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _table(config: VerifiersEnvConfig, vf: Any, where: str) -> dict[str, Any]:
    """Return verifiers' own configuration of the environment.

    Nothing is tried again: a failed rollout is replaced by the run, and a second conversation would be recorded as part of the first.
    """
    kind = vf.env_config_type(config.taskset)
    agents = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(agents) != 1:
        raise ConfigError(
            f"{where} is played by {len(agents)} agents ({', '.join(agents)}), and a rollout is the conversation of one; an environment of "
            "several cannot be trained on here"
        )
    once = {"max_retries": 0, "rules": []}
    budget = config.budget
    agent: dict[str, Any] = {
        "harness": {"id": _harness(config, vf), **config.harness_args},
        "runtime": config.runtime,
        "max_turns": budget.max_turns,
        "max_output_tokens": budget.max_completion_tokens,
        "timeout": {"rollout": budget.max_duration_s},
        "retries": once,
    }
    return {"taskset": {"id": config.taskset, **config.taskset_args}, agents[0]: agent, "retries": once}


def _harness(config: VerifiersEnvConfig, vf: Any) -> str:
    """Return the harness's id: the configured one, the taskset's own, or the plain chat loop."""
    if config.harness is not None:
        return config.harness
    own = vf.default_harness_id(config.taskset)
    return own if own == config.taskset else "null"


def _listed(tasks: Callable[[], Iterable[Any]], deadline_s: float, where: str) -> list[Any]:
    """Return all tasks, if they are there within the deadline. A thread cannot be killed: it ends with the next task, if there is one."""
    done: Future[list[Any]] = Future()
    given_up = threading.Event()

    def run() -> None:
        try:
            done.set_result(list(itertools.takewhile(lambda _: not given_up.is_set(), tasks())))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="verifiers taskset", daemon=True).start()
    try:
        return done.result(deadline_s)
    except TimeoutError as error:
        if not done.done():
            given_up.set()
            raise ConfigError(f"{where} was not loaded after `load_deadline_s`={deadline_s:g} s") from error
        raise ConfigError(f"{where}: its tasks cannot be listed: {in_words(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: its tasks cannot be listed: {in_words(error)}") from error
