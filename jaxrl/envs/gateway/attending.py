"""A program that talks to the policy for one rollout is attended: until it is done, or the policy fails.

In: what the program does, as a coroutine, and the `Talk` that answers it. Out: the task in which it was done, whatever became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from jaxrl.envs.gateway.talk import Talk

logger = logging.getLogger(__name__)

CLEAN_UP_S = 10.0
"""How long a program whose rollout is over may take to clean up after itself."""

T = TypeVar("T")


async def attended(program: Coroutine[Any, Any, T], talk: Talk, *, name: str, patience_s: float = 0.0) -> asyncio.Task[T]:
    """Wait for a program; what it still asks when it is done is given up.

    Args:
      program: what it does; cancelled if the policy fails, and then has `CLEAN_UP_S` seconds to clean up.
      talk: what answers it.
      name: name of its task.
      patience_s: how long requests that wait are not given up when it is cancelled, for one that would log them as errors.

    Returns:
      The task, done: with a result, an exception, or cancelled by what it awaited itself.

    Raises:
      Exception: what the policy failed with, whatever the program made of it.
    """
    task = asyncio.create_task(program, name=name)
    failed = asyncio.create_task(talk.failed.wait())
    try:
        await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed.cancel()
        talk.shut()
        if task.cancel() and patience_s > 0:
            await asyncio.wait({task}, timeout=patience_s)
        await talk.close()
        await asyncio.wait({task}, timeout=CLEAN_UP_S)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio logs an exception that nobody looked at
    if talk.failure is not None:
        raise talk.failure
    return task


class Unheeded:
    """Says once of each field that a request cannot choose how tokens are sampled."""

    def __init__(self, env_name: str, program: str) -> None:
        self._env_name = env_name
        self._program = program
        self._said: set[str] = set()

    def __call__(self, unheeded: Mapping[str, Any]) -> None:
        """Say it of fields that a request has."""
        for name, value in unheeded.items():
            if name not in self._said:
                self._said.add(name)
                logger.warning(
                    "env %r: the %s asks for `%s`=%.60r, which is not heeded: tokens that are trained on are sampled as the "
                    "environment's `sampling` says; set it there (said once)",
                    self._env_name,
                    self._program,
                    name,
                    value,
                )
