"""An environment of the user's own, found by its import path.

In: `package.module:name`, the settings of its table. Out: what that class or function returns, seen to be an environment. Whatever goes
wrong meanwhile is a mistake in the configuration, in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.blame import in_words
from jaxrl.config.env import PythonEnvConfig, env_name
from jaxrl.envs.base import Environment, checked_tasks
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError

_METHODS = ("tasks", "play", "demonstration", "close")
"""What an environment can be asked."""
_SETTINGS = ("budget", "system_prompt", "examples")
"""Settings of the table that are passed on where there is a parameter for them."""


def python_environment(config: PythonEnvConfig) -> Environment:
    """Build the environment that `import_path` names: it is called with `name`, `kwargs` and those of the table's settings that it takes.

    Raises:
      ConfigError: it cannot be imported, does not take its arguments, raises, has no place for a setting, or returns no environment.
    """
    name = env_name(config)
    where = f"env {name!r}: `import_path`={config.import_path!r}"
    make = imported(config.import_path, where)
    _refuse_scorer(config, make, where)
    arguments = {"name": name, **config.kwargs, **_settings(config, make, where)}
    if "name" in config.kwargs:
        raise ConfigError(f"{where}: `kwargs` holds a `name`; set the environment's own `name`")
    try:
        environment = make(**arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}=..." for key in arguments)
        raise ConfigError(f"{where} was called with ({given}) and raised {in_words(error)}") from error
    missing = [method for method in _METHODS if not callable(getattr(environment, method, None))]
    if missing:
        raise ConfigError(
            f"{where} returned a {type(environment).__name__}, which is no environment: it has no method `{missing[0]}`; derive it from "
            "`jaxrl.envs.chat.ChatEnvironment`, or see `jaxrl.envs.base.Environment`"
        )
    called = getattr(environment, "name", None)
    if called != name:
        raise ConfigError(f"{where} returned an environment called {called!r}; call it what it is told, {name!r}")
    try:
        checked_tasks(name, environment.tasks())
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: its tasks cannot be listed: {in_words(error)}") from error
    return environment


def _refuse_scorer(config: PythonEnvConfig, make: Callable[..., Any], where: str) -> None:
    """Refuse a function of a task and a reply: it lacks the decorator that makes it an environment."""
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # some functions of C have none
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [name for name, parameter in parameters.items() if parameter.kind in kinds and parameter.default is parameter.empty]
    if inspect.isclass(make) or len(needed) != 2 or {"name", *config.kwargs, *_SETTINGS} & set(needed):
        return
    raise ConfigError(
        f"{where} is a function of ({', '.join(needed)}), and what makes an environment is called with its `name`; if it scores a reply, "
        "decorate it with `@single_turn(tasks)` (`jaxrl.envs.plain`)"
    )


def _settings(config: PythonEnvConfig, make: Callable[..., Any], where: str) -> Mapping[str, Any]:
    """Return the settings of the table that the callable takes."""
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # some functions of C have none
        parameters = {}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    passed: dict[str, Any] = {}
    for key in _SETTINGS:
        is_set = key in config.model_fields_set
        if key in config.kwargs:
            continue
        if key in parameters or (takes_any and is_set):
            passed[key] = getattr(config, key)
        elif is_set:
            raise ConfigError(f"{where} has no parameter `{key}`, so that setting has no place to go; add one, or leave the setting out")
    return passed
