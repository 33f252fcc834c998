"""The few calls of `verifiers` 0.4 that `jaxrl.envs.verifiers.package` makes, so that it is tested where the package is not installed.

`test_package.py` holds the real one to the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


class AgentConfig:
    """A role of an environment, as a default of a field."""


class Data:
    """The data of a task."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, *, mode: str, exclude_defaults: bool, exclude: set[str]) -> dict[str, Any]:
        """Return the fields."""
        assert mode == "json" and exclude_defaults
        return {name: value for name, value in self._fields.items() if name not in exclude}


def task(key: str, **fields: Any) -> Any:
    """Return a task."""
    return SimpleNamespace(key=key, data=Data(**fields))


class Tasks:
    """A taskset."""

    def __init__(self, load: Callable[[], Iterable[Any]], *, bounded: bool = True) -> None:
        self._load = load
        self.bounded = bounded

    def __iter__(self) -> Any:
        return iter(self._load())


class Env:
    """An environment: each episode is what `episode` makes of its task, once its trace is minted."""

    def __init__(self, taskset: Tasks, episode: Callable[[Any], Any] | None = None) -> None:
        self.taskset = taskset
        self.contexts: list[Any] = []
        self._episode = episode

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold nothing."""
        yield

    def slots(self, task: Any, n: int) -> list[Any]:
        """Plan episodes."""
        return [SimpleNamespace(task=task) for _ in range(n)]

    async def run_slot(self, slot: Any, ctx: Any, *, on_trace: Callable[[Any], None]) -> Any:
        """Play an episode."""
        self.contexts.append(ctx)
        on_trace(SimpleNamespace(id=f"trace of {slot.task.key}"))
        assert self._episode is not None
        return self._episode(slot.task)


def package(env: Env, *, agents: tuple[str, ...] = ("agent",), own_harness: str | None = None) -> tuple[ModuleType, list[dict[str, Any]]]:
    """Return a module like `verifiers.v1` that loads this environment, and the configurations that it was asked for."""
    asked: list[dict[str, Any]] = []
    module = ModuleType("verifiers.v1")

    def resolve(table: dict[str, Any]) -> dict[str, Any]:
        asked.append(table)
        return table

    fields = {name: SimpleNamespace(default=AgentConfig()) for name in agents} | {"taskset": SimpleNamespace(default=None)}
    parts = {
        "AgentConfig": AgentConfig,
        "EvalClientConfig": lambda **fields: SimpleNamespace(**fields),
        "ModelContext": lambda **fields: SimpleNamespace(**fields),
        "default_harness_id": lambda taskset: own_harness or "bash",
        "env_config_type": lambda taskset: SimpleNamespace(model_fields=fields),
        "load_environment": lambda table: env,
        "resolve_env_config": resolve,
    }
    for name, part in parts.items():
        setattr(module, name, part)
    return module, asked
