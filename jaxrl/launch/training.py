"""From a `RunConfig` to wired objects, started and stopped in order.

In: a validated configuration, and whether to resume. Out: a finished run and its folder. What can fail without a device
(folder, tokenizer, environments) is built first; then the device thread, the model, the programs, the engine; then both
arms run until the last step is reported, Ctrl-C, or the first failure. It decides nothing about training: each part has
its own rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl.batching import pack
from jaxrl.blame import START_UP, blame, failing_in
from jaxrl.config.run import RunConfig
from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.envs.base import Environment
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.errors import ConfigError, ModelLoadError, RunFailedError
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.known_models import load_renderer
from jaxrl.launch.arrays import ArrayArm, array_arm, check_sizes
from jaxrl.launch.compile_cache import use_compile_cache
from jaxrl.launch.environments import EnvironmentBuilder, check_sources, check_tasks, probe_environments
from jaxrl.launch.measuring import Measuring, is_owed
from jaxrl.launch.preflight import check_template
from jaxrl.launch.side_by_side import ctrl_c, ended_at_once, in_thread, side_by_side
from jaxrl.models import build_mesh
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.crash import CrashReporter
from jaxrl.monitors.folder import check_run_folder, only_writer, resume_command, write_config
from jaxrl.monitors.logs import Redactor, RunLog, logging_to, secrets_in
from jaxrl.monitors.terminal import EngineMeter
from jaxrl.orchestrator.orchestrator import Orchestrator
from jaxrl.trainer.checkpoint import Checkpointer, complete_steps
from jaxrl.trainer.loop import Trainer
from jaxrl.transport.memory import InProcessChannel

logger = logging.getLogger(__name__)

BATCH_DEADLINE_S = 7 * 86400.0
"""How long the trainer waits for a batch. Playing a step and measuring the policy take as long as they take; the orchestrator bounds
each wait of theirs, and whatever ends it wakes the trainer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    step: int
    """Steps done, those before a resume included."""
    is_complete: bool
    """False if it was asked to stop early; its state is saved then."""


def launch(
    config: RunConfig,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Outcome:
    """Train until `run.max_steps`, or until Ctrl-C.

    Args:
      config: the run. Its folder must be new, or hold a complete checkpoint if `resume`.
      resume: go on from the newest complete checkpoint of the folder.
      stop_after: stop, as Ctrl-C would, after this step; the schedule still is that of `run.max_steps`.
      devices: what `trainer.mesh` spans; None takes every device of the process.

    Returns:
      Where the run is and how far it came.

    Raises:
      ConfigError, ModelLoadError: something in the configuration cannot be used; nothing was trained.
      RunFailedError: the run cannot go on.
      JaxrlError: the first failure of any part. If a step is saved, the log says which one and how to resume.
    """
    run_dir = config.run_dir
    check_run_folder(run_dir, resume=resume, has_checkpoint=lambda: bool(complete_steps(run_dir / "checkpoints")))
    renderer, train, heldout = build_worlds(config)
    template = check_template(config, renderer, train, heldout)
    check_sizes(config)
    refuse_many_processes()
    mesh = build_mesh(config.trainer.mesh, devices)
    checkpointer = Checkpointer(run_dir / "checkpoints", config.trainer.checkpoint.keep_last, mesh)
    start_step = _step_to_resume(checkpointer, config.run.max_steps) if resume else None
    if start_step is not None and start_step == config.run.max_steps and not is_owed(run_dir, start_step, heldout):
        logger.warning("%s already is at step %d of %d; `--run.max_steps N` goes on from there", run_dir, start_step, start_step)
        return Outcome(run_dir, start_step, is_complete=True)
    redactor = Redactor(secrets_in(os.environ))
    with only_writer(run_dir), logging_to(run_dir / "logs", redactor) as log, contextlib.ExitStack() as stack:
        if start_step is None:
            write_config(config)
        logger.info("run %r: steps %d to %d on %s", config.run.name, (start_step or 0) + 1, config.run.max_steps, mesh.devices.flat[0])
        crash = CrashReporter(run_dir, log, checkpointer.latest_complete)
        stack.enter_context(crash.reporting(ConfigError, ModelLoadError))
        monitors = _open_monitors(config, log, start_step, mesh, renderer)
        stack.callback(monitors.close)
        monitors.note(chat_template_sha256=template.template_sha256)
        for remark in template.remarks:
            logger.warning("%s", remark)
        stack.enter_context(ended_at_once(lambda error: crash.write(blame(error, _where(monitors))), monitors.abandon))
        asyncio.run(probe_environments(config, renderer, train))
        cache = use_compile_cache(is_on=config.run.compile_cache, directory=config.run.compile_cache_dir)
        arm = stack.enter_context(array_arm(config, renderer, mesh, monitors.progress, checkpointer, start_step))
        monitors.note(start_up=arm.start_up | {"compile_cache": None if cache is None else str(cache)})
        monitors.status("")
        if start_step is not None:
            monitors.say(f"restored step {start_step}; goes on with step {start_step + 1}")
        monitors.meter("engine", EngineMeter(arm.engine.stats))
        crash.watch("device thread", arm.device.describe)
        crash.watch("engine", arm.engine.describe)
        stack.enter_context(_start_up_is_permanent())
        for env in (*train, *heldout):
            stack.callback(env.close)
        # Here too, before the device thread is stopped and has nothing to say any more.
        with crash.reporting(ConfigError, ModelLoadError), failing_in("orchestrator"):
            done = asyncio.run(_train(config, arm, checkpointer, renderer, train, heldout, monitors, crash, stop_after))
        logger.info("done: step %d of %d", done, config.run.max_steps)
        monitors.close()
        if done < config.run.max_steps:
            anew = f"nothing was trained or saved; delete {run_dir} to start again"
            further = f"resume with: {resume_command(run_dir)}" if done else anew
            logger.warning("stopped after step %d; %s", done, further)
    return Outcome(run_dir, done, is_complete=done >= config.run.max_steps)


def _where(monitors: MonitorSet) -> str:
    return f"{START_UP}: {monitors.phase}" if monitors.phase else START_UP


def _open_monitors(config: RunConfig, log: RunLog, start_step: int | None, mesh: Mesh, renderer: Renderer) -> MonitorSet:
    with failing_in("monitors"):
        return MonitorSet(
            config.run_dir,
            config.monitors,
            name=config.run.name,
            max_steps=config.run.max_steps,
            resume_step=start_step,
            devices=[str(device) for device in mesh.devices.flat],
            run_config=config.model_dump(mode="json"),
            decode_token=renderer.token_text,
            log=log,
        )


def refuse_many_processes() -> None:
    """Raise a ConfigError in a job of several processes: the embedded engine serves one process."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ConfigError(
            f"`inference.type`='embedded' runs engine, orchestrator and trainer in one process, but this job has "
            f"{jax.process_count()} processes; start one process, which uses all of its own devices through `trainer.mesh`"
        )


def build_worlds(config: RunConfig) -> tuple[Renderer, list[Environment], list[Environment]]:
    """Build everything that needs no device: the renderer, the training and the evaluation environments.

    Raises:
      ConfigError: an environment's setting is wrong, a held-out question is trained on, nobody could write an environment's
        replies, its task sampler or a gate cannot be built, or `model.renderer` names what there is not.
      ModelLoadError: the model directory has no usable tokenizer.
    """
    model = config.orchestrator.model
    renderer = load_renderer(model.name, renderer=model.renderer, tool_format=model.tool_format)
    train = [build_environment(env) for env in config.orchestrator.train.env]
    heldout = [build_environment(env) for env in config.orchestrator.eval.env]
    require_disjoint_questions(train, heldout)
    check_sources(config, train)
    check_tasks(config, train)
    return renderer, train, heldout


async def _train(
    config: RunConfig,
    arm: ArrayArm,
    checkpointer: Checkpointer,
    renderer: Renderer,
    train: Sequence[Environment],
    heldout: Sequence[Environment],
    monitors: MonitorSet,
    crash: CrashReporter,
    stop_after: int | None,
) -> int:
    """Run both arms side by side and return how many steps are done."""
    pool = PolicyPool([EmbeddedEndpoint(arm.engine, arm.device, arm.store)], arm.start_step)
    channel = InProcessChannel(capacity=1)
    channel.bind_loop(asyncio.get_running_loop())
    last_step = min(config.run.max_steps, stop_after or config.run.max_steps)
    orchestrator = _build_orchestrator(config, pool, channel, renderer, train, heldout, monitors, last_step)
    if arm.orchestrator_state is not None:
        orchestrator.restore(arm.orchestrator_state)
        # Only now: a resume that is refused must leave the folder's configuration as it was.
        write_config(config)
    trainer = Trainer(
        arm.programs,
        arm.state,
        config.trainer,
        device=arm.device,
        channel=channel,
        publish=arm.store.publish,
        checkpointer=checkpointer,
        snapshot=lambda: orchestrator.snapshot(trainer.step),
        max_steps=last_step,
        start_step=arm.start_step,
        should_report_logprobs=config.monitors.rollouts and config.monitors.token_export,
        batch_deadline_s=BATCH_DEADLINE_S,
        progress=monitors.progress,
    )
    crash.watch("orchestrator", orchestrator.describe)
    crash.watch("trainer", lambda: f"{trainer.step} of {last_step} steps done")
    crash.watch("policy", lambda: f"version {pool.version} is served")

    def abandon() -> None:
        impatient = RunFailedError("the process was told to end a second time before the orderly stop was through")
        crash.write(blame(impatient, "orchestrator"))
        monitors.abandon()

    def work() -> None:
        with crash.remembering():
            trainer.run()

    with ctrl_c(orchestrator.request_stop, monitors.status, abandon):
        try:
            await side_by_side(orchestrator.run(), in_thread(work, "trainer"))
        finally:
            await pool.close()
    return trainer.step


def _build_orchestrator(
    config: RunConfig,
    pool: PolicyPool,
    channel: InProcessChannel,
    renderer: Renderer,
    train: Sequence[Environment],
    heldout: Sequence[Environment],
    monitors: MonitorSet,
    last_step: int,
) -> Orchestrator:
    # Twice the slots keep the engine full while some rollouts are with their environments.
    builder = EnvironmentBuilder(config, pool, renderer, asyncio.Semaphore(2 * config.engine.num_slots))
    # Called once the orchestrator is there.
    measuring = Measuring(config, heldout, pool, renderer, monitors, lambda version: orchestrator.spent_by(version))
    orchestrator = Orchestrator(
        config.orchestrator,
        builder.build_all(train),
        pool=pool,
        channel=channel,
        pack=functools.partial(
            pack,
            row_length=config.trainer.row_length,
            rows=config.trainer.rows,
            shards=config.trainer.mesh.row_shards,
            max_segments=config.trainer.max_segments,
            overlong=config.trainer.overlong,
        ),
        monitors=monitors,
        max_steps=last_step,
        seed=config.run.seed,
        async_level=config.async_level,
        row_length=config.trainer.row_length,
        overlong=config.trainer.overlong,
        evaluate=measuring if heldout else None,
    )
    return orchestrator


def _step_to_resume(checkpointer: Checkpointer, max_steps: int) -> int:
    step = checkpointer.latest_complete()
    if step is None:
        raise ConfigError(
            f"{checkpointer.directory} has no complete checkpoint, so there is nothing to resume from: delete "
            f"{checkpointer.directory.parent} and start anew with --config; a smaller "
            "`trainer.checkpoint.every_n_steps` saves sooner"
        )
    if step > max_steps:
        raise ConfigError(f"the run is at step {step} already, beyond `run.max_steps`={max_steps}; raise it to go on")
    return step


@contextlib.contextmanager
def _start_up_is_permanent() -> Iterator[None]:
    """Keep what start-up made out of garbage collections: walking it held up the event loop for a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
