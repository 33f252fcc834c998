"""How likely the policy finds the environment's own reference replies: a measure that needs no reward and no sampling.

In: an environment's tasks, and the policy. Out: the negative logprob of each demonstration, summed over the tokens of all its replies,
the ids that end them included, each given everything before it. A demonstration is rendered as training on it renders it
(`envs.text_session`). It writes no metric; `scores` takes the mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxrl.batching import rollout_to_samples
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment, demonstrated_turns
from jaxrl.envs.play import play_rollout
from jaxrl.envs.text_session import demonstration_session
from jaxrl.envs.transcript import Window
from jaxrl.errors import JaxrlError
from jaxrl.evals.policy import LivePolicy
from jaxrl.types import Boundary, Rollout, Task, TrainingSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DemonstrationScore:
    """What the policy says of one demonstration."""

    nll: float
    """Sum of the negative logprobs of its tokens at temperature 1, in nats."""
    num_tokens: int
    """Tokens of the replies, their ends included; at least 1."""


class DemonstrationScorer:
    """Scores an environment's demonstrations, as often as asked; each is rendered once.

    Args:
      env: the environment; tasks that it has no demonstration for are passed over.
      policy: who is asked.
      history: what a later turn makes of earlier ones.
      rollout_deadline_s: deadline of playing one demonstration, in seconds.
    """

    def __init__(self, env: Environment, policy: LivePolicy, *, history: History = "template", rollout_deadline_s: float = 300.0) -> None:
        self._env = env
        self._pool = policy.pool
        self._renderer = policy.renderer
        self._window = Window(policy.window)
        self._history: History = history
        self._rollout_deadline_s = rollout_deadline_s
        self._samples: dict[str, list[TrainingSample]] = {}

    async def score(self, tasks: Mapping[str, Task], free: asyncio.Semaphore) -> dict[str, DemonstrationScore | None]:
        """Score every demonstration under what the policy serves now.

        Args:
          tasks: by a name that stands for the task with its seed.
          free: how many requests may run at the same time.

        Returns:
          One entry per task, in their order; None where there is no demonstration, none that can be rendered, or no answer.
        """
        await self._render({name: task for name, task in tasks.items() if name not in self._samples}, free)
        failures: list[JaxrlError] = []

        async def ask(samples: list[TrainingSample]) -> DemonstrationScore | None:
            nll, num_tokens = 0.0, 0
            try:
                for sample in samples:
                    async with free:
                        logprobs_L = await self._pool.score(sample.token_ids)
                    nll -= float(np.sum(logprobs_L, where=sample.loss_mask, dtype=np.float64))
                    num_tokens += int(sample.loss_mask.sum())
            except JaxrlError as error:
                failures.append(error)
                return None
            return DemonstrationScore(nll, num_tokens)

        async with asyncio.TaskGroup() as group:
            shown = {name: self._samples[name] for name in tasks if self._samples[name]}
            asked = {name: group.create_task(ask(samples)) for name, samples in shown.items()}
        if failures:
            logger.warning("env %r: %d demonstrations were not scored; the first one: %s", self._env.name, len(failures), failures[0])
        return {name: asked[name].result() if name in asked else None for name in tasks}

    async def _render(self, tasks: Mapping[str, Task], free: asyncio.Semaphore) -> None:
        """Play demonstrations through the environment, which knows what comes before a reply.

        Keeps of each task the branches of its demonstration, one unless the chat template rewrites history; none if there is none.
        """
        if not tasks:
            return
        rollouts = {name: self._rollout(task, name) for name, task in tasks.items()}
        shown = [rollout for rollout in rollouts.values() if self._env.demonstration(rollout.task.spec) is not None]

        async def play(rollout: Rollout) -> None:
            demonstration, window, history = self._env.demonstration, self._window, self._history
            session = demonstration_session(rollout, self._renderer, demonstration, window=window, history=history)
            async with free:
                await play_rollout(self._env, rollout, session, self._rollout_deadline_s)

        async with asyncio.TaskGroup() as group:
            for rollout in shown:
                group.create_task(play(rollout))
        samples = {id(rollout): rollout_to_samples(rollout) for rollout in shown}
        lost = [rollout for rollout in shown if not samples[id(rollout)] or self._is_broken(rollout)]
        for rollout in lost:
            samples[id(rollout)] = []
        if lost:
            failure = lost[0].failure
            logger.warning(
                "env %r: %d of %d demonstrations cannot be scored and are left out; the first one, of task %r: %s",
                self._env.name, len(lost), len(shown), lost[0].task.id,
                failure.message if failure else f"it was over after {lost[0].num_turns} replies ({lost[0].stop_reason})",
            )  # fmt: skip
        if not shown:
            logger.warning("env %r: no task of the evaluation has a demonstration, so there is no `demonstration_nll`", self._env.name)
        self._samples |= {name: samples.get(id(rollout), []) for name, rollout in rollouts.items()}

    def _is_broken(self, rollout: Rollout) -> bool:
        """Say whether the environment asked for more or fewer replies than the demonstration has; a failed scorer is of no concern."""
        if rollout.failure is not None and rollout.failure.boundary in (Boundary.ENV, Boundary.POLICY):
            return True
        turns = demonstrated_turns(self._env.demonstration(rollout.task.spec))
        return turns is not None and rollout.num_turns < len(turns)

    def _rollout(self, task: Task, name: str) -> Rollout:
        return Rollout(task=task, group_id=f"demonstration/{self._env.name}/{name}", member=0, draw_index=0)
