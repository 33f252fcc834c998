"""Tools that are Python functions of a user's: each runs in worker processes of its own, which can be killed.

In: where the function is, and what the settings say of it. Out: a `Tool`. A function that raises tells the policy so, in few words; one
that hangs, ends its process or returns what cannot be read has failed. Nothing of a user's is imported in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Any

from jaxrl.config.env import PythonToolConfig
from jaxrl.envs.grading.process import LateError, RaisedError
from jaxrl.envs.grading.scorer import worker_environment
from jaxrl.envs.grading.workers import Workers
from jaxrl.envs.tools.arguments import schema_error
from jaxrl.envs.tools.signature import described
from jaxrl.envs.tools.tool import Tool, ToolError, ToolFailedError
from jaxrl.errors import ConfigError, GraderError

DESCRIBE_DEADLINE_S = 120.0
"""How long importing a function and looking at its signature may take."""


def python_tool(config: PythonToolConfig, where: str) -> Tool:
    """Return the tool that a section describes, once its function is seen to be importable.

    Args:
      config: the section.
      where: the environment, for messages.

    Raises:
      ConfigError: the function cannot be imported, or no schema of its arguments can be made or read.
    """
    where = f"{where}: tool {config.name!r} ({config.import_path!r})"
    seen = _described_in_a_process(config.import_path, where)
    parameters = config.parameters or seen["parameters"]
    if words := schema_error(parameters):
        raise ConfigError(f"{where}: `parameters` is no JSON schema of arguments: {words}")
    workers = Workers(
        config.import_path,
        {},
        deadline_s=config.deadline_s,
        num_workers=config.workers,
        environment=worker_environment(os.environ, config.env_vars),
        returns="text",
    )

    async def call(arguments: dict[str, Any]) -> str:
        try:
            return await asyncio.wrap_future(workers.submit(**arguments))
        except RaisedError as error:
            raise ToolError(error.headline) from None
        except LateError as error:
            raise ToolFailedError(f"{where} {error}", told=f"not done after {config.deadline_s:g} s", is_late=True) from None
        except GraderError as error:
            raise ToolFailedError(f"{where} {error}", told="the tool failed") from None

    return Tool(config.name, call, config.description or seen["description"], parameters, deadline_s=None, close=workers.close)


def _described_in_a_process(import_path: str, where: str) -> dict[str, Any]:
    workers = Workers(
        f"{described.__module__}:{described.__name__}",
        {},
        deadline_s=DESCRIBE_DEADLINE_S,
        num_workers=1,
        environment=worker_environment(os.environ),
        returns="text",
    )
    with contextlib.closing(workers):
        try:
            return json.loads(workers.submit(import_path).result())
        except GraderError as error:
            raise ConfigError(f"{where}: the function cannot be used: it {error}") from None
