"""How likely the policy finds the environment's own reference replies: a measure that needs no reward and no sampling.

In: an environment's tasks, and the policy. Out: the negative logprob of each demonstration, summed over the tokens of all its replies,
the ids that end them included, each given everything before it. A demonstration is rendered as training on it renders it
(`envs.text_session`). It writes no metric; `scores` takes the mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.batching import rollout_to_samples
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment, TaskSpec, demonstrated_turns
from jaxrl.envs.play import play_rollout
from jaxrl.envs.text_session import demonstration_session
from jaxrl.envs.transcript import Window
from jaxrl.errors import JaxrlError
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import Renderer
from jaxrl.tasks import task_of
from jaxrl.types import Boundary, Rollout, TrainingSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DemonstrationScore:
    """What the policy says of one demonstration."""

    nll: float
    """Sum of the negative logprobs of its tokens at temperature 1, in nats."""
    num_tokens: int
    """Tokens of the replies, their ends included; at least 1."""


class DemonstrationScorer:
    """Scores the demonstrations of a fixed list of tasks, as often as asked; they are rendered once.

    Args:
      env: the environment; tasks that it has no demonstration for are passed over.
      tasks: which of its tasks.
      renderer: messages to ids, with the policy's tokenizer.
      window: prompt plus reply tokens that the policy can hold.
      history: what a later turn makes of earlier ones.
      rollout_deadline_s: deadline of playing one demonstration, in seconds.
    """

    def __init__(
        self,
        env: Environment,
        tasks: Sequence[TaskSpec],
        renderer: Renderer,
        *,
        window: int,
        history: History = "template",
        rollout_deadline_s: float = 300.0,
    ) -> None:
        self._env = env
        self._tasks = tasks
        self._renderer = renderer
        self._window = Window(window)
        self._history: History = history
        self._rollout_deadline_s = rollout_deadline_s
        self._samples: list[list[TrainingSample]] | None = None

    async def score(self, pool: Pool, free: asyncio.Semaphore) -> list[DemonstrationScore | None]:
        """Score every demonstration under what `pool` serves now.

        Args:
          pool: the policy.
          free: how many requests may run at the same time.

        Returns:
          One entry per task, in their order; None where there is no demonstration, none that can be rendered, or no answer.
        """
        if self._samples is None:
            self._samples = await self._render(free)
        failures: list[JaxrlError] = []

        async def ask(samples: list[TrainingSample]) -> DemonstrationScore | None:
            nll, num_tokens = 0.0, 0
            try:
                for sample in samples:
                    async with free:
                        logprobs_L = await pool.score(sample.token_ids)
                    nll -= float(np.sum(logprobs_L, where=sample.loss_mask, dtype=np.float64))
                    num_tokens += int(sample.loss_mask.sum())
            except JaxrlError as error:
                failures.append(error)
                return None
            return DemonstrationScore(nll, num_tokens)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(samples)) if samples else None for samples in self._samples]
        if failures:
            logger.warning("env %r: %d demonstrations were not scored; the first one: %s", self._env.name, len(failures), failures[0])
        return [None if task is None else task.result() for task in asked]

    async def _render(self, free: asyncio.Semaphore) -> list[list[TrainingSample]]:
        """Play the demonstrations through the environment, which knows what comes before a reply.

        Returns:
          One entry per task: the branches of its demonstration, one unless the chat template rewrites history; empty if there are none.
        """
        rollouts = [self._rollout(spec, index) for index, spec in enumerate(self._tasks)]
        shown = [rollout for rollout in rollouts if self._env.demonstration(rollout.task.spec) is not None]

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
        return [samples.get(id(rollout), []) for rollout in rollouts]

    def _is_broken(self, rollout: Rollout) -> bool:
        """Say whether the environment asked for more or fewer replies than the demonstration has; a failed scorer is of no concern."""
        if rollout.failure is not None and rollout.failure.boundary in (Boundary.ENV, Boundary.POLICY):
            return True
        turns = demonstrated_turns(self._env.demonstration(rollout.task.spec))
        return turns is not None and rollout.num_turns < len(turns)

    def _rollout(self, spec: TaskSpec, index: int) -> Rollout:
        task = task_of(self._env.name, spec)
        return Rollout(task=task, group_id=f"demonstration/{self._env.name}/{index}", member=0, draw_index=index)
