"""A sampler of the user's own, found by its import path.

In: `package.module:name`, a task list, and what a sampler may want to know. Out: what that class or function returns, seen to be a sampler.
Whatever goes wrong meanwhile is a mistake in the configuration, in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.blame import in_words
from jaxrl.config.tasks import PythonTasksConfig
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError
from jaxrl.tasks.base import TaskSpec
from jaxrl.tasks.checked import CheckedSampler

_METHODS = ("sample", "update", "state_dict", "load_state_dict", "metrics", "__iter__", "__next__")
"""What a sampler can be asked."""
_HOOKS = (*_METHODS, "next_index", "learn", "memory", "remember")
"""What is called without being waited for: the methods, and those that a `FiniteSampler` leaves to its subclass."""
_GIVEN = ("tasks", "rng_seed")
"""What every sampler is given, and `kwargs` cannot set."""


def python_sampler(config: PythonTasksConfig, specs: Sequence[TaskSpec], rng_seed: int, offered: Mapping[str, Any]) -> CheckedSampler:
    """Build the sampler that `import_path` names: it is called with the tasks, `rng_seed`, `kwargs`, and what it takes of `offered`.

    Args:
      config: where it is found.
      specs: at least one, with distinct ids; handed over in a list of its own.
      rng_seed: seed of its draws.
      offered: further keyword arguments, each passed if there is a parameter for it that `kwargs` does not set.

    Raises:
      ConfigError: it cannot be imported, does not take its arguments, raises, or returns no sampler, or one with a method that must be
        awaited.
    """
    where = f"`tasks.import_path`={config.import_path!r}"
    make = imported(config.import_path, where)
    if taken := [name for name in _GIVEN if name in config.kwargs]:
        raise ConfigError(f"{where}: `tasks.kwargs` holds a `{taken[0]}`, which the run sets itself; leave it out")
    arguments = {"rng_seed": rng_seed, **_taken(make, offered), **config.kwargs}
    try:
        sampler = make(list(specs), **arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(["tasks", *(f"{key}=..." for key in arguments)])
        raise ConfigError(f"{where} was called with ({given}) and raised {in_words(error)}") from error
    missing = [method for method in _METHODS if not callable(getattr(sampler, method, None))]
    if isinstance(sampler, type) or missing:
        if inspect.iscoroutine(sampler):
            sampler.close()
        what = f"the class {sampler.__name__}" if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        lacks = f": it has no method `{missing[0]}`" if missing else ""
        raise ConfigError(
            f"{where} returned {what}, which is no task sampler{lacks}; derive it from `jaxrl.tasks.FiniteSampler`, or see "
            "`jaxrl.tasks.TaskSampler`"
        )
    if waits := [hook for hook in _HOOKS if _is_async(getattr(sampler, hook, None))]:
        raise ConfigError(
            f"{where}: `{waits[0]}` of {type(sampler).__name__} is an `async def`, which nothing waits for, so it would never run; write "
            "it as a plain `def`"
        )
    try:
        return CheckedSampler(sampler, specs, config.import_path, config.kwargs)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError):
            raise ConfigError(f"{where}: {error}") from error
        raise ConfigError(f"{where}: its state cannot be asked for: {in_words(error)}") from error


def _is_async(method: object) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _taken(make: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a callable has parameters for."""
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # some functions of C have none
        return {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}
