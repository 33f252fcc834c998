"""From what `jaxrl eval` was asked for to a result: an environment, somebody who is measured, the harness between them.

In: an `EvalRequest`. Out: an `EvalResult`, and its folder. What costs nothing is checked first; a served model is measured without JAX, and
one in a checkpoint brings it in only once all else is known to fit. It words no table and knows no exit code.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxrl.config.checkpoints import RunCheckpoint
from jaxrl.config.env import GymQuestionsConfig
from jaxrl.config.eval_command import EvalCommandConfig
from jaxrl.config.evals import EvalConfig, EvalParameters, library_versions, settings_in_evaluation
from jaxrl.config.model import FrozenModelConfig, ToolFormat
from jaxrl.config.run import RunConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment
from jaxrl.envs.build import build_environment
from jaxrl.evals import EnvEvalHarness, EvalPolicy, EvalResult, LivePolicy
from jaxrl.evals.book import EpisodeBook
from jaxrl.evals.compare import compare
from jaxrl.evals.in_turns import InTurns
from jaxrl.evals.plan import plan_episodes, plan_record
from jaxrl.evals.served import ServedPolicy
from jaxrl.inference.frozen import api_key
from jaxrl.inference.http import HttpEndpoint
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering.known_models import load_renderer

logger = logging.getLogger(__name__)

SERVED_CONCURRENCY = 16
"""Episodes that are played at the same time with a served model, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """A model that is measured in an engine of this process."""

    name: str
    """Its directory, or its name on the hub; for a run's checkpoint, the model that the run started from."""
    renderer: str = "auto"
    """As `model.renderer` of a run has it."""
    tool_format: ToolFormat = "auto"
    """As `model.tool_format` of a run has it."""
    checkpoint: RunCheckpoint | None = None
    """Which checkpoint of a run; None takes the directory's own weights."""
    run: RunConfig | None = None
    """The run's configuration, if there is a checkpoint."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What is to be measured, on what, and where it is written down."""

    dataset: str
    """The ENV_SPEC, for the record."""
    command: EvalCommandConfig
    """The environment, and the engine of a checkpoint."""
    parameters: EvalParameters
    """What is played, and how it is judged."""
    model: FrozenModelConfig | CheckpointModel
    """Who is measured: behind a server, or in a checkpoint."""
    output_dir: Path
    """Where rows, scores and times are written."""
    is_in_turns: bool = False
    """Take tasks from each difficulty in turn, so that the first few are of all of them."""
    num_asked: int | None = None
    """Tasks that somebody asked for by a flag: fewer are a warning."""
    run_seed: int = 0
    """Seed of all sampling."""
    concurrency: int | None = None
    """Episodes at the same time; None takes what suits who is measured."""
    should_resume: bool = True
    """Go on with what the folder holds."""
    should_probe_policy: bool = False
    """Also play one task twice at temperature 0."""
    before: EvalResult | None = None
    """An earlier result to compare with."""
    is_forced: bool = False
    """Compare whatever differs."""


class Display(Protocol):
    """What a person sees meanwhile."""

    def phase(self, text: str) -> None:
        """Say what is being done."""
        ...

    def progress(self, num_done: int, num_planned: int) -> None:
        """Show how many episodes are over."""
        ...


def evaluate(request: EvalRequest, display: Display) -> EvalResult:
    """Measure a model on an environment.

    Args:
      request: what, on what, and where to.
      display: shown how far it is.

    Raises:
      EndpointDownError, EnvUnreachableError: a server cannot be reached; of what was played, the rows are kept.
      ConfigError, ModelLoadError, EngineError: what was asked for cannot be done; nothing was played.
      JaxrlError: whatever else ended it; rows are kept.
    """
    display.phase(f"preparing {request.dataset}")
    env = build_environment(request.command.env)
    try:
        _warn_of_few_tasks(request, len(env.tasks()))
        if request.is_in_turns:
            env = InTurns(env)
        if request.before is not None:
            # With the scores of before: what does not fit is known before a model is loaded.
            asked = _config(request, request.parameters.model)
            compare(request.before, EvalResult(asked, env.name, 0, None, request.before.scores), force=request.is_forced)
        if isinstance(request.model, FrozenModelConfig):
            result = asyncio.run(_measure_served(request, request.model, env, display))
        else:
            result = _measure_checkpoint(request, request.model, env, display)
        _warn_of_seeds(result)
        return result
    finally:
        env.close()


async def _measure_served(request: EvalRequest, model: FrozenModelConfig, env: Environment, display: Display) -> EvalResult:
    endpoint = HttpEndpoint(
        model.base_url[0],
        model.name,
        api_key=api_key(model.api_key_var, os.environ, "--api-key-var"),
        api_key_var=model.api_key_var,
        timeout_s=model.timeout_s,
        max_attempts=model.max_attempts,
        max_connections=model.max_concurrency,
    )
    try:
        display.phase(f"asking {model.base_url[0]} for {model.name}")
        await endpoint.probe()
        policy = ServedPolicy(endpoint, run_seed=request.run_seed)
        return await _play(request, env, policy, _config(request, model.name), display, step=0, concurrency=SERVED_CONCURRENCY)
    finally:
        await endpoint.close()


def _measure_checkpoint(request: EvalRequest, model: CheckpointModel, env: Environment, display: Display) -> EvalResult:
    renderer = load_renderer(model.name, renderer=model.renderer, tool_format=model.tool_format)
    display.phase("starting JAX")
    # Only now: all that costs nothing is checked.
    from jaxrl.launch.checkpoint_model import checkpoint_model, step_of, weights_id

    step = 0 if model.checkpoint is None else step_of(model.checkpoint)
    config = _config(request, f"{request.parameters.model}@{weights_id(model.name, model.checkpoint, step)}")
    _check_folder(request, env, config, step)
    engine = request.command.inference
    with checkpoint_model(model.name, model.checkpoint, model.run, step, engine, renderer, display.phase) as endpoint:

        async def measure() -> EvalResult:
            pool = PolicyPool([endpoint], step)
            try:
                policy = LivePolicy(pool, renderer, request.run_seed, engine.max_model_len)
                return await _play(request, env, policy, config, display, step=step, concurrency=2 * engine.num_slots)
            finally:
                await pool.close()

        return asyncio.run(measure())


async def _play(
    request: EvalRequest, env: Environment, policy: EvalPolicy, config: EvalConfig, display: Display, *, step: int, concurrency: int
) -> EvalResult:
    harness = EnvEvalHarness(
        env,
        policy,
        output_dir=request.output_dir,
        concurrency=request.concurrency or concurrency,
        rollout_deadline_s=request.command.env.rollout_deadline_s,
        history=_history(request),
        should_probe_policy=request.should_probe_policy,
        on_progress=display.progress,
    )
    return await harness.run(config, step=step, resume=request.should_resume)


def _check_folder(request: EvalRequest, env: Environment, config: EvalConfig, step: int) -> None:
    """Raise a ConfigError if the folder cannot take this evaluation, before a model is loaded for it."""
    if not request.should_resume:
        return
    plan = plan_episodes(env, config.eval_parameters)
    book = EpisodeBook([episode.episode_id for episode in plan], request.output_dir)
    try:
        book.open(plan_record(config, plan, step=step, history=_history(request), has_demonstrations=False), resume=True)
    finally:
        book.close()


def _history(request: EvalRequest) -> History:
    return request.command.env.history


def _config(request: EvalRequest, model: str) -> EvalConfig:
    env = request.command.env
    return EvalConfig(
        library_versions=library_versions(env),
        dataset=request.dataset,
        eval_parameters=request.parameters.model_copy(update={"model": model}),
        env_parameters=settings_in_evaluation(env),
    )


def _warn_of_few_tasks(request: EvalRequest, num_tasks: int) -> None:
    """Say so if the environment has fewer tasks than were asked for, and what became of the others."""
    asked = request.num_asked
    if asked is None or asked <= num_tasks:
        return
    env = request.command.env
    split, heldout_frac = getattr(env, "split", None), getattr(env, "heldout_frac", None)
    why = ""
    if heldout_frac is not None and split in ("train", "heldout"):
        share = heldout_frac if split == "heldout" else 1 - heldout_frac
        why = f": `split`={split!r} keeps about {100 * share:.3g} % of the distinct questions"
        if isinstance(env, GymQuestionsConfig):
            why += f", of which `--env.num_tasks` {env.num_tasks} were generated{' for each tier' if env.tiers else ''}"
    logger.warning("asked for %d tasks, the environment has %d%s", asked, num_tasks, why)


def _warn_of_seeds(result: EvalResult) -> None:
    """Say so if every task began alike under each of several seeds, at temperature 0."""
    parameters = result.config.eval_parameters
    if parameters.seeds is None or parameters.sampling.temperature > 0:
        return
    begun: dict[str, dict[int, str]] = {}
    for row in result.rows:
        if row["observation_sha"] is not None:
            begun.setdefault(row["task_id"], {})[row["seed"]] = row["observation_sha"]
    repeated = [by_seed for by_seed in begun.values() if len(by_seed) > 1]
    if repeated and all(len(set(by_seed.values())) == 1 for by_seed in repeated):
        logger.warning(
            "no task began differently under another seed (`seeds` %s): unless the environment looks at its seed later on, these are the "
            "same episodes %d times; play them with one seed (leave `--seeds` out)",
            ",".join(map(str, parameters.seeds)), max(map(len, repeated)),
        )  # fmt: skip
