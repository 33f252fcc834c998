"""The scorer of an environment whose reward function runs in worker processes.

In: which function, and the environment's settings. Out: `score(spec, text)`, a coroutine function as
`SingleTurnEnvironment` takes it, whose errors name the environment and the function. Processes start with the first
reply, so whatever builds an environment only to look at its tasks starts none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.dump import redact
from jaxrl.config.env import EnvBase, env_name
from jaxrl.config.reward import MathVerifyRewardConfig, PythonRewardConfig, RewardConfig
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.grading.workers import Workers
from jaxrl.errors import ConfigError, GraderError

MATHS = "jaxrl.envs.grading.maths:math_verify_score"


class WorkerScorer:
    """Scores replies with a function that runs in worker processes.

    Args:
      config: the environment's settings: its name, the deadline, the number of processes.
      import_path: the function, `package.module:function`, called as `function(spec, text, **kwargs)`.
      kwargs: keyword arguments of every call.
      env_vars: names of environment variables that the processes get though they are named like secrets.
    """

    def __init__(
        self, config: EnvBase, import_path: str, kwargs: Mapping[str, Any] | None = None, *, env_vars: Sequence[str] = ()
    ) -> None:
        self._where = f"env {env_name(config)!r}: reward function {import_path!r}"
        self._workers = Workers(
            import_path,
            kwargs or {},
            deadline_s=config.reward_deadline_s,
            num_workers=config.reward_workers,
            environment=worker_environment(os.environ, env_vars),
        )

    async def score(self, spec: TaskSpec, text: str) -> float | None:
        """Return what the function gives for a reply: a finite number, or None.

        Raises:
          GraderError: it raised, returned anything else, ended its process, or was killed at the deadline.
        """
        try:
            return await asyncio.wrap_future(self._workers.submit(spec, text))
        except GraderError as error:
            raise GraderError(f"{self._where} {error}") from None

    def check(self) -> None:
        """Import the function once, in a process of its own.

        Raises:
          ConfigError: it cannot be imported, or does not take the arguments.
        """
        try:
            self._workers.check()
        except GraderError as error:
            raise ConfigError(f"{self._where} {error}") from None

    def close(self) -> None:
        """Kill the processes. May be called twice."""
        self._workers.close()


def reward_scorer(config: EnvBase, reward: RewardConfig) -> WorkerScorer:
    """Return the scorer that `reward` asks for, checked.

    Raises:
      ConfigError: the function cannot be used, or a package is missing.
    """
    match reward:
        case MathVerifyRewardConfig():
            if importlib.util.find_spec("math_verify") is None:
                raise ConfigError(
                    f"env {env_name(config)!r}: `reward.type`='math_verify' needs the package `math-verify`; install it with "
                    "`pip install 'jaxrl[math]'`"
                )
            return WorkerScorer(config, MATHS)
        case PythonRewardConfig():
            scorer = WorkerScorer(config, reward.import_path, reward.kwargs, env_vars=reward.env_vars)
            scorer.check()
            return scorer
    raise ConfigError(f"no scorer is built from {type(reward).__name__}; add a case to `jaxrl.envs.grading.scorer`")


def worker_environment(environment: Mapping[str, str], keep: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables of a worker process: without what looks like a secret, and with the devices left alone.

    Example:
      >>> worker_environment({"HOME": "/home/me", "WANDB_API_KEY": "abc", "JUDGE_KEY": "def"}, keep=["JUDGE_KEY"])
      {'HOME': '/home/me', 'JUDGE_KEY': 'def', 'JAX_PLATFORMS': 'cpu'}
    """
    kept = {name: value for name, value in environment.items() if name in keep or redact({name: value}) == {name: value}}
    # A function that uses JAX must not take the memory of the devices that the run trains on.
    return kept | {"JAX_PLATFORMS": "cpu"}
