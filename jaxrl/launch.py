"""From a `RunConfig` to wired objects, started and stopped in order: the only file that names every concrete class.

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
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl.batching import pack
from jaxrl.config.env import EnvBase, env_name
from jaxrl.config.run import RunConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.engine.engine import Engine
from jaxrl.envs.base import Environment
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.errors import ConfigError, DeadlineError
from jaxrl.evals.harness import EnvEvalHarness
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.models import ModelSpec, build_mesh, load_pretrained
from jaxrl.monitors import MonitorSet
from jaxrl.monitors.folder import check_run_folder, logging_to, only_writer, resume_command, write_config
from jaxrl.orchestrator.algo import build_algorithm
from jaxrl.orchestrator.orchestrator import Orchestrator
from jaxrl.orchestrator.ports import Evaluate
from jaxrl.orchestrator.sampler import Sampler, TrainEnv
from jaxrl.tasks import build_task_sampler
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.loop import ORCHESTRATOR_PART, Trainer
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import StepPrograms, build_programs
from jaxrl.transport.memory import InProcessChannel
from jaxrl.weights.memory import WeightStore

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 600.0
"""How long an orderly stop may take: the running step, a checkpoint, the device thread's last call."""

BATCH_DEADLINE_S = 7 * 86400.0
"""How long the trainer waits for a batch. Playing a step and measuring the policy take as long as they take; the orchestrator bounds
each wait of theirs, and whatever ends it wakes the trainer."""

Progress = Callable[[str, float, float], None]
"""Called with a phase, how much of it is done, and how much there is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    step: int
    """Steps done, those before a resume included."""
    is_complete: bool
    """False if it was asked to stop early; its state is saved then."""


@dataclasses.dataclass(slots=True)
class ArrayArm:
    """The model on its devices: what trains, what generates, and the thread that owns both."""

    device: DeviceThread
    programs: StepPrograms
    state: TrainState
    store: WeightStore
    engine: Engine
    start_step: int
    orchestrator_state: bytes | None
    """The orchestrator's part of the checkpoint that was restored; None for a new run."""


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
    check_run_folder(run_dir, resume=resume)
    renderer, train, heldout = build_worlds(config)
    refuse_many_processes()
    mesh = build_mesh(config.trainer.mesh, devices)
    checkpointer = Checkpointer(run_dir / "checkpoints", config.trainer.checkpoint.keep_last, mesh)
    start_step = _step_to_resume(checkpointer, config.run.max_steps) if resume else None
    if start_step is not None and start_step == config.run.max_steps:
        logger.warning("%s already is at step %d of %d; `--run.max_steps N` goes on from there", run_dir, start_step, start_step)
        return Outcome(run_dir, start_step, is_complete=True)
    with only_writer(run_dir), logging_to(run_dir / "logs"), contextlib.ExitStack() as stack:
        if start_step is None:
            write_config(config)
        logger.info("run %r: steps %d to %d on %s", config.run.name, (start_step or 0) + 1, config.run.max_steps, mesh.devices.flat[0])
        monitors = MonitorSet(
            run_dir,
            config.monitors,
            name=config.run.name,
            max_steps=config.run.max_steps,
            resume_step=start_step,
            devices=[str(device) for device in mesh.devices.flat],
        )
        stack.callback(monitors.close)
        arm = stack.enter_context(array_arm(config, renderer, mesh, monitors.progress, checkpointer, start_step))
        monitors.status("")
        stack.enter_context(_start_up_is_permanent())
        stack.enter_context(_saying_how_to_resume(checkpointer, run_dir))
        done = asyncio.run(_train(config, arm, checkpointer, renderer, train, heldout, monitors, stop_after))
        logger.info("done: step %d of %d", done, config.run.max_steps)
        monitors.close()
        if done < config.run.max_steps:
            anew = f"nothing was trained or saved; delete {run_dir} to start again"
            further = f"resume with: {resume_command(run_dir)}" if done else anew
            logger.warning("stopped after step %d; %s", done, further)
    return Outcome(run_dir, done, is_complete=done >= config.run.max_steps)


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
      ConfigError: an environment's setting is wrong, or a held-out question is trained on.
      ModelLoadError: the model directory has no usable tokenizer.
    """
    renderer = Renderer.from_pretrained(config.orchestrator.model.name)
    train = [build_environment(env) for env in config.orchestrator.train.env]
    heldout = [build_environment(env) for env in config.orchestrator.eval.env]
    require_disjoint_questions(train, heldout)
    return renderer, train, heldout


@contextlib.contextmanager
def array_arm(
    config: RunConfig,
    renderer: Renderer,
    mesh: Mesh,
    progress: Progress,
    checkpointer: Checkpointer | None = None,
    start_step: int | None = None,
) -> Iterator[ArrayArm]:
    """Load the model, or restore it, compile every program, and keep the device thread running for the body of the `with`.

    Args:
      config: the run.
      renderer: gives the engine its text.
      mesh: where the trainer's arrays live; the engine takes the first of its devices.
      progress: called with `loading` and `compiling`.
      checkpointer: where `start_step` is restored from.
      start_step: None starts from the model directory.
    """
    device = DeviceThread("device")
    device.start()
    try:
        arm = device.run(_build_array_arm, config, renderer, mesh, progress, checkpointer, start_step, device, kind="engine")
        device.attach_engine(arm.engine.has_work, arm.engine.tick)
        yield arm
    finally:
        device.stop(STOP_DEADLINE_S)


def _build_array_arm(
    config: RunConfig,
    renderer: Renderer,
    mesh: Mesh,
    progress: Progress,
    checkpointer: Checkpointer | None,
    start_step: int | None,
    device: DeviceThread,
) -> ArrayArm:
    """Runs on the device thread."""
    trainer = config.trainer
    progress("loading", 0, 1)
    model, params = load_pretrained(config.orchestrator.model.name, param_dtype=trainer.param_dtype, mesh=mesh)
    _check_fits(config, model.spec)
    programs = build_programs(model, trainer, mesh, config.run.max_steps)
    orchestrator_state = None
    if checkpointer is None or start_step is None:
        state = programs.init_state(params)
    else:
        del params
        state, parts = checkpointer.restore(start_step, programs.abstract_state)
        orchestrator_state = parts[ORCHESTRATOR_PART]
    progress("loading", 1, 1)

    version = start_step or 0
    # While an evaluation holds the served version, the trainer may publish one more for each step that it may be behind.
    num_versions = max(2, 1 + config.async_level)
    store = WeightStore(model.spec, config.engine.dtype, num_versions=num_versions, device=mesh.devices.flat[0])
    store.publish(version, state.params)
    progress("compiling", 0, 2)
    programs.compile()
    progress("compiling", 1, 2)
    engine = Engine(model.spec, store.get(version), config.engine, version=version, decode_text=renderer.decode)
    engine.warm_up(lambda _, done, total: progress("compiling", 1 + done / total, 2))
    progress("compiling", 2, 2)
    return ArrayArm(device, programs, state, store, engine, version, orchestrator_state)


def _check_fits(config: RunConfig, spec: ModelSpec) -> None:
    name = config.orchestrator.model.name
    if config.engine.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"`inference.max_model_len`={config.engine.max_model_len} is beyond the {spec.max_position_embeddings} positions of {name}; "
            "lower it"
        )


async def _train(
    config: RunConfig,
    arm: ArrayArm,
    checkpointer: Checkpointer,
    renderer: Renderer,
    train: Sequence[Environment],
    heldout: Sequence[Environment],
    monitors: MonitorSet,
    stop_after: int | None,
) -> int:
    """Run both arms side by side and return how many steps are done."""
    settings = config.orchestrator
    pool = PolicyPool([EmbeddedEndpoint(arm.engine, arm.device, arm.store)], arm.start_step)
    # Twice the slots keep the engine full while some rollouts are with their environments.
    places = asyncio.Semaphore(2 * config.engine.num_slots)
    channel = InProcessChannel(capacity=1)
    channel.bind_loop(asyncio.get_running_loop())
    last_step = min(config.run.max_steps, stop_after or config.run.max_steps)
    orchestrator = Orchestrator(
        settings,
        [
            _train_env(config, index, env_config, env, pool, renderer, places)
            for index, (env_config, env) in enumerate(zip(settings.train.env, train, strict=True))
        ],
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
        evaluate=_evaluate(config, heldout, pool, renderer, monitors) if heldout else None,
    )
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
        batch_deadline_s=BATCH_DEADLINE_S,
    )
    with _ctrl_c(orchestrator.request_stop, monitors):
        try:
            await side_by_side(orchestrator.run(), _in_thread(trainer.run, "trainer"))
        finally:
            await pool.close()
    return trainer.step


def _train_env(
    config: RunConfig,
    index: int,
    env_config: EnvBase,
    env: Environment,
    pool: PolicyPool,
    renderer: Renderer,
    places: asyncio.Semaphore,
) -> TrainEnv:
    """Give an environment its task sampler, its sampler and its algorithm."""
    settings = config.orchestrator
    return TrainEnv(
        name=env_name(env_config),
        ratio=env_config.ratio,
        tasks=build_task_sampler(env_config.tasks, env.tasks(), rng_seed=config.run.seed + index),
        sampler=Sampler(
            env,
            pool,
            renderer,
            settings.sampling_of(env_config),
            run_seed=config.run.seed,
            window=config.engine.max_model_len,
            rollout_deadline_s=env_config.rollout_deadline_s,
            places=places,
        ),
        algorithm=build_algorithm(settings.algo_of(env_config), pool),
    )


def _evaluate(
    config: RunConfig, heldout: Sequence[Environment], pool: PolicyPool, renderer: Renderer, monitors: MonitorSet
) -> Evaluate:
    """Return the function that measures the served policy on every held-out environment."""
    settings = config.orchestrator.eval
    harnesses = [
        EnvEvalHarness(
            env,
            pool,
            renderer,
            env_config.sampling or settings.sampling,
            run_seed=config.run.seed,
            window=config.engine.max_model_len,
            num_tasks=settings.num_tasks,
            success_threshold=settings.success_threshold,
            concurrency=2 * config.engine.num_slots,
            rollout_deadline_s=env_config.rollout_deadline_s,
            on_progress=functools.partial(monitors.progress, f"evaluating {env.name}"),
        )
        for env_config, env in zip(settings.env, heldout, strict=True)
    ]

    async def evaluate(step: int, version: int) -> None:
        for harness in harnesses:
            result = await harness.run(step)
            scores = result.scores | {"policy_version": float(version)}
            await asyncio.to_thread(monitors.log_eval, step, result.env_name, scores, result.rows)
            logger.info("evaluation of %r at step %d: %s", result.env_name, step, scores)

    return evaluate


def _in_thread(call: Callable[[], None], name: str) -> Future[None]:
    """Run a blocking call in a thread of its own; the default pool is for short work."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


async def side_by_side(playing: Awaitable[None], training: Future[None]) -> None:
    """Wait for both arms to end, and raise what the asyncio arm raised, or else what the trainer raised.

    A trainer that fails reaches the asyncio arm through the channel, so that one's failure is the first; what follows from it
    on the other side is logged.
    """
    try:
        await playing
    except BaseException as first:
        try:
            await _settle(training)
        except Exception as error:
            if error is not first:
                logger.error("the trainer failed too: %s: %s", type(error).__name__, error)
        raise
    await _settle(training)


async def _settle(training: Future[None]) -> None:
    """Wait for the trainer to end; its own failure has reached the orchestrator through the channel already."""
    timer = asyncio.timeout(STOP_DEADLINE_S)
    try:
        async with timer:
            await asyncio.wrap_future(training)
    except TimeoutError as error:
        if not timer.expired():  # the trainer's own failure may itself be a timeout
            raise
        raise DeadlineError(f"the trainer did not end within {STOP_DEADLINE_S:g} s after the orchestrator did") from error


@contextlib.contextmanager
def _ctrl_c(request_stop: Callable[[], None], monitors: MonitorSet) -> Iterator[None]:
    """Let the first Ctrl-C (or SIGTERM) stop the run in order, and the second one end the process at once."""
    loop = asyncio.get_running_loop()
    is_asked = False

    def stop() -> None:
        nonlocal is_asked
        if is_asked:
            monitors.abandon()
            os._exit(130)
        is_asked = True
        monitors.status("stopping: finishing the running step and saving; Ctrl-C again ends at once")
        request_stop()

    # Signals can be handled in the main thread only; a run inside another program's thread goes without.
    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


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
def _saying_how_to_resume(checkpointer: Checkpointer, run_dir: Path) -> Iterator[None]:
    """Log what is saved when training fails."""
    try:
        yield
    except Exception:
        if (step := checkpointer.latest_complete()) is not None:
            logger.warning("the run failed; step %d is saved; resume with: %s", step, resume_command(run_dir))
        raise


@contextlib.contextmanager
def _start_up_is_permanent() -> Iterator[None]:
    """Keep what start-up made out of garbage collections: walking it held up the event loop for a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
