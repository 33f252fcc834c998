"""One pass of the policy over an environment's tasks, with a row for every rollout that was planned.

In: an environment, the policy pool, a renderer, token sampling. Out: an `EvalResult`: rows in plan order and scores
computed from them. The version is held still meanwhile, seeds come from a scope that no training environment can have,
and nothing of training (task order, sampling, random state) is touched. It trains nothing and writes no file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.envs.play import play_rollout
from jaxrl.envs.session import PolicySession, eval_seed_scope
from jaxrl.evals.demonstrations import DemonstrationScore, DemonstrationScorer
from jaxrl.evals.scores import score_rows
from jaxrl.inference.endpoint import version_salt
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.monitors.rollouts import conversation_record
from jaxrl.tasks import task_of
from jaxrl.types import Rollout


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What one evaluation of one environment found."""

    env_name: str
    step: int
    """The training step after which it was made; 0 is the base policy."""
    version: int
    """The policy version that was held."""
    scores: dict[str, float]
    """See `score_rows`."""
    rows: list[dict[str, Any]]
    """One JSON object per planned rollout, in plan order."""


class EnvEvalHarness:
    """Evaluates the policy on one environment.

    Args:
      env: the held-out environment.
      pool: the policy.
      renderer: messages to ids and back.
      sampling: token sampling of evaluation; temperature 0 is greedy.
      run_seed: `run.seed`.
      window: prompt plus reply tokens that the policy can hold.
      num_tasks: play the first so many tasks; None plays all.
      success_threshold: a rollout whose reward reaches this is a success.
      demonstration_nll: also score the environment's own reference replies.
      history: what a later turn makes of earlier ones.
      concurrency: rollouts that are played at the same time.
      rollout_deadline_s: deadline of one rollout, in seconds.
      hold_deadline_s: how long weight updates are kept waiting, in seconds.
      on_progress: called with (rollouts done, rollouts planned) before the first rollout and after each one.
    """

    def __init__(
        self,
        env: Environment,
        pool: PolicyPool,
        renderer: Renderer,
        sampling: SamplingConfig,
        *,
        run_seed: int,
        window: int,
        num_tasks: int | None = None,
        success_threshold: float = 1.0,
        demonstration_nll: bool = False,
        history: History = "template",
        concurrency: int = 64,
        rollout_deadline_s: float = 300.0,
        hold_deadline_s: float = 600.0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._env = env
        self._pool = pool
        self._renderer = renderer
        self._sampling = sampling
        self._run_seed = run_seed
        self._window = window
        self._plan = list(env.tasks()[:num_tasks])
        self._success_threshold = success_threshold
        self._history: History = history
        self._concurrency = concurrency
        self._rollout_deadline_s = rollout_deadline_s
        self._hold_deadline_s = hold_deadline_s
        self._on_progress = on_progress
        self._demonstrations: DemonstrationScorer | None = None
        if demonstration_nll:
            self._demonstrations = DemonstrationScorer(
                env, self._plan, renderer, window=window, history=history, rollout_deadline_s=rollout_deadline_s
            )

    async def run(self, step: int) -> EvalResult:
        """Play every planned rollout once and score them. A failing rollout is a row, not an exception.

        Args:
          step: the training step after which this is made, 0 for the base policy; a label, no part of any seed.
        """
        plan = self._plan
        free = asyncio.Semaphore(self._concurrency)
        async with self._pool.hold_version(f"evaluation of {self._env.name!r}", self._hold_deadline_s) as version:
            rollouts = [self._plan_rollout(spec, index, step, version) for index, spec in enumerate(plan)]
            num_done = 0
            if self._on_progress is not None:
                self._on_progress(num_done, len(plan))
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._play(rollout, free)) for rollout in rollouts]
                for played in asyncio.as_completed(playing):
                    await played
                    num_done += 1
                    if self._on_progress is not None:
                        self._on_progress(num_done, len(plan))
            scores = None if self._demonstrations is None else await self._demonstrations.score(self._pool, free)
        rows = [_row(rollout, index, version) for index, rollout in enumerate(rollouts)]
        for row, score in zip(rows, scores or [], strict=False):
            row |= _demonstration_columns(score)
        return EvalResult(self._env.name, step, version, score_rows(rows, self._success_threshold), rows)

    def _plan_rollout(self, spec: TaskSpec, index: int, step: int, version: int) -> Rollout:
        task = task_of(self._env.name, spec)
        return Rollout(task=task, group_id=f"eval/{self._env.name}/{step}/{version}/{index}", member=0, draw_index=index)

    async def _play(self, rollout: Rollout, free: asyncio.Semaphore) -> None:
        session = PolicySession(
            self._pool,
            self._renderer,
            rollout,
            self._sampling,
            run_seed=self._run_seed,
            seed_scope=eval_seed_scope(self._env.name),
            window=self._window,
            cache_salt=lambda: version_salt(self._pool.version),
            history=self._history,
        )
        async with free:
            await play_rollout(self._env, rollout, session, self._rollout_deadline_s)


def _demonstration_columns(score: DemonstrationScore | None) -> dict[str, Any]:
    """Return what a row says of the task's demonstration; null where there is none."""
    return {
        "demonstration_nll": None if score is None else score.nll,
        "demonstration_tokens": None if score is None else score.num_tokens,
    }


def _row(rollout: Rollout, index: int, version: int) -> dict[str, Any]:
    """Return the record of one rollout: a JSON object with a reward or null, never a 0 in place of an error."""
    failure = rollout.failure
    return {
        "index": index,
        "task_id": rollout.task.id,
        "status": "error" if failure else "unscored" if rollout.reward is None else "ok",
        "reward": rollout.reward,
        "error": None if failure is None else asdict(failure),
        **conversation_record(rollout),
        "text": rollout.completion_text,
        "metrics": dict(rollout.metrics),
        "turns": rollout.num_turns,
        "completion_tokens": rollout.num_completion_tokens,
        "is_truncated": rollout.is_truncated,
        "stop_reason": rollout.stop_reason,
        "version": version,
        "token_versions": sorted({int(v) for node in rollout.nodes if node.versions is not None for v in node.versions}),
    }
