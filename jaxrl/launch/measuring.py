"""Measuring the policy in training: the held-out environments of a run, each with its harness, and where their results go.

In: environments, the policy, and the version that is served. Out: for each environment the scores in the step's row of metrics, next to
what training had taken by then; its rows, and its result as a file that can be compared with others. When to measure, the orchestrator
says. Nothing of training is touched.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxrl.blame import failing_in
from jaxrl.config.env import EnvBase
from jaxrl.config.eval_command import dataset_of
from jaxrl.config.evals import EvalConfig, EvalParameters, EvalSectionConfig, library_versions, settings_in_evaluation
from jaxrl.config.run import RunConfig
from jaxrl.envs.base import Environment
from jaxrl.evals import DemonstrationScorer, EnvEvalHarness, EvalResult, LivePolicy
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.folder import eval_paths

logger = logging.getLogger(__name__)


class Measuring:
    """Measures the served policy on every held-out environment, one after the other (`orchestrator.ports.Evaluate`).

    Args:
      config: the run.
      heldout: its evaluation environments, built.
      pool: the policy.
      renderer: messages to ids and back.
      monitors: where results are written down.
      spent_by: what training had taken by a version, by name; joins the scores.
    """

    def __init__(
        self,
        config: RunConfig,
        heldout: Sequence[Environment],
        pool: PolicyPool,
        renderer: Renderer,
        monitors: MonitorSet,
        spent_by: Callable[[int], Mapping[str, float]],
    ) -> None:
        self._run_dir = config.run_dir
        self._monitors = monitors
        self._spent_by = spent_by
        settings = config.orchestrator.eval
        policy = LivePolicy(pool, renderer, config.run.seed, config.engine.max_model_len)
        self._measured = [
            (
                EnvEvalHarness(
                    env,
                    policy,
                    history=env_config.history,
                    demonstrations=_demonstrations(settings, env_config, env, policy),
                    # Twice the slots keep the engine full while some rollouts are with their environments.
                    concurrency=2 * config.engine.num_slots,
                    rollout_deadline_s=env_config.rollout_deadline_s,
                    on_progress=functools.partial(monitors.progress, f"evaluating {env.name}"),
                ),
                eval_config(settings, env_config, config.orchestrator.model.name),
            )
            for env_config, env in zip(settings.env, heldout, strict=True)
        ]

    async def __call__(self, step: int, version: int) -> None:
        """Measure the policy, but for environments whose result was written down before the run was resumed.

        Args:
          step: steps that are done.
          version: the policy version that is served, and held.
        """
        spent = self._spent_by(version)
        for harness, asked in self._measured:
            if eval_paths(self._run_dir, step, harness.env_name)[1].exists():
                logger.info("evaluation of %r at step %d: its result is there already", harness.env_name, step)
                continue
            with failing_in(f"environment {harness.env_name!r}"):
                result = await harness.run(asked, step=step)
            _warn_of_missing(result)
            # A hold that ran past its deadline lets a newer version in, which is what the next environment is then measured with.
            measured = version if result.version is None else result.version
            scores = result.flat_scores() | {"policy_version": float(measured), **spent}
            await asyncio.to_thread(self._monitors.log_eval, step, result.env_name, scores, result.rows, result.to_json)
            logger.info("evaluation of %r at step %d: %s", result.env_name, step, scores)


def eval_config(settings: EvalSectionConfig, env: EnvBase, model: str) -> EvalConfig:
    """Return what is played on an environment in each evaluation of a run.

    Args:
      settings: `orchestrator.eval`.
      env: one of its environments.
      model: the model that the run trains.
    """
    budget = getattr(env, "budget", None)
    return EvalConfig(
        library_versions=library_versions(env),
        dataset=dataset_of(env),
        eval_parameters=EvalParameters(
            split=getattr(env, "split", None),
            limit=settings.num_tasks,
            seeds=None if settings.seeds is None else tuple(settings.seeds),
            samples_per_task=settings.samples_per_task,
            sampling=settings.sampling_of(env),
            max_turns=None if budget is None else budget.max_turns,
            success_threshold=settings.success_threshold_of(env),
            model=model,
            system_prompt=env.system_prompt,
        ),
        env_parameters=settings_in_evaluation(env),
    )


def is_owed(run_dir: Path, step: int, heldout: Sequence[Environment]) -> bool:
    """Say whether the policy of a step was not measured on every environment, though the run had come that far."""
    return any(not eval_paths(run_dir, step, env.name)[1].exists() for env in heldout)


def _demonstrations(settings: EvalSectionConfig, config: EnvBase, env: Environment, policy: LivePolicy) -> DemonstrationScorer | None:
    if not settings.demonstration_nll:
        return None
    return DemonstrationScorer(env, policy, history=config.history, rollout_deadline_s=config.rollout_deadline_s)


def _warn_of_missing(result: EvalResult) -> None:
    """Say what a success rate does not: how many rollouts are not in it, and why."""
    planned, scored = result.scores["n_planned"], result.scores["n_scored"]
    if scored == planned:
        return
    first = next((row["error"] for row in result.rows if row["error"] is not None), None)
    told = "the environment gave them no reward" if first is None else f"the first that failed: {first['type']}: {first['message']}"
    logger.warning(
        "evaluation of %r at step %d: %d of %d rollouts have no score%s; %s",
        result.env_name, result.step, planned - scored, planned, "" if scored else ", so there is no success rate", told,
    )  # fmt: skip
