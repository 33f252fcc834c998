"""The array arm of a run: the model on its devices, and the one thread that owns both its trainer and its engine.

In: a validated configuration, a mesh and, for a resume, a checkpoint. Out: an `ArrayArm` whose programs are compiled and
whose engine is warm, for the body of a `with`. It knows no environment and no event loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from jax.sharding import Mesh

from jaxrl.blame import START_UP, failing_in
from jaxrl.config.run import RunConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.engine import Engine
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering import Renderer
from jaxrl.models import ModelSpec, load_pretrained, load_spec
from jaxrl.models.mesh import check_model_fits
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.compiles import num_cache_hits, num_compiles
from jaxrl.trainer.loop import ORCHESTRATOR_PART
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import StepPrograms, build_programs
from jaxrl.weights.memory import WeightStore

STOP_DEADLINE_S = 600.0
"""How long an orderly stop may take: the running step, a checkpoint, the device thread's last call."""

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Shows how far a phase is."""

    def __call__(self, phase: str, done: float, total: float, detail: str = "") -> None:
        """Take a phase, how much of it is done and how much there is, and what is being done."""


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
    start_up: dict[str, float]
    """What start-up took: `load_s, compile_s` seconds, `programs` made by this process, and `programs_from_cache` among them."""


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
        device.attach_engine(arm.engine.has_work, functools.partial(_tick, arm.engine))
        yield arm
    finally:
        with failing_in("device thread"):
            device.stop(STOP_DEADLINE_S)


def _tick(engine: Engine) -> None:
    with failing_in("engine"):
        engine.tick()


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
    num_programs, num_cached = num_compiles(), num_cache_hits()
    started_s = time.monotonic()
    with failing_in(f"{START_UP}: loading"):
        programs, state, orchestrator_state = _load(config, mesh, progress, checkpointer, start_step)
    loaded_s = time.monotonic()
    version = start_step or 0
    model = programs.model
    with failing_in(f"{START_UP}: compiling"):
        store = WeightStore(model.spec, config.engine.dtype, num_versions=config.num_policy_versions, device=mesh.devices.flat[0])
        store.publish(version, state.params)
        engine = Engine(model.spec, store.get(version), config.engine, version=version, decode_text=renderer.decode)
        with _compiling(progress, programs.num_programs + engine.num_programs) as begin:
            programs.compile(functools.partial(begin, 0))
            engine.warm_up(functools.partial(begin, programs.num_programs))
    times = {"load_s": round(loaded_s - started_s, 3), "compile_s": round(time.monotonic() - loaded_s, 3)}
    start_up = times | {"programs": num_compiles() - num_programs, "programs_from_cache": num_cache_hits() - num_cached}
    words = "loaded in %(load_s).1f s; %(programs)d programs in %(compile_s).1f s, %(programs_from_cache)d of them from the compile cache"
    logger.info(words, start_up)
    return ArrayArm(device, programs, state, store, engine, version, orchestrator_state, start_up)


def _load(
    config: RunConfig, mesh: Mesh, progress: Progress, checkpointer: Checkpointer | None, start_step: int | None
) -> tuple[StepPrograms, TrainState, bytes | None]:
    """Return the trainer's programs and the state to start from: the model directory's, or a checkpoint's with the orchestrator's part."""
    progress("loading", 0, 1)
    model, params = load_pretrained(
        config.orchestrator.model.name,
        param_dtype=config.trainer.param_dtype,
        mesh=mesh,
        on_progress=lambda done, total: progress("loading", min(done / total, 0.99), 1, f"weights {done / 2**20:,.0f} MiB"),
    )
    programs = build_programs(model, config.trainer, mesh, config.run.max_steps)
    orchestrator_state = None
    if checkpointer is None or start_step is None:
        state = programs.init_state(params)
    else:
        del params
        progress("loading", 0.99, 1, f"the checkpoint of step {start_step}")
        with failing_in("checkpoint"):
            state, parts = checkpointer.restore(start_step, programs.abstract_state)
        orchestrator_state = parts[ORCHESTRATOR_PART]
        logger.info("restored step %d; goes on with step %d", start_step, start_step + 1)
    progress("loading", 1, 1)
    return programs, state, orchestrator_state


@contextlib.contextmanager
def _compiling(progress: Progress, total: int) -> Iterator[Callable[[int, str, int, int], None]]:
    """Show each program when its compilation begins, and log it with its seconds when that ends.

    Yields:
      Takes the programs that are done before an arm, and what the arm's `on_progress` takes.
    """
    running: tuple[str, float] | None = None

    def log() -> None:
        if running is not None:
            logger.info("compiled %s in %.1f s", running[0], time.monotonic() - running[1])

    def begin(before: int, name: str, done: int, _: int) -> None:
        nonlocal running
        log()
        running = name, time.monotonic()
        progress("compiling", before + done, total, name)

    yield begin
    log()
    progress("compiling", total, total)


def check_sizes(config: RunConfig) -> None:
    """Refuse a run that the sizes of its model do not allow; reads its config.json and nothing else.

    Raises:
      ConfigError: the window is longer than the model's positions, or the mesh does not divide the model.
      ModelLoadError: the model is not there, or is of a family that is not built.
    """
    spec = load_spec(config.orchestrator.model.name)
    check_window(config.orchestrator.model.name, config.engine.max_model_len, spec)
    check_model_fits(spec, config.trainer.mesh)


def check_window(name: str, max_model_len: int, spec: ModelSpec) -> None:
    """Raise a ConfigError if the engine's window is longer than the model's."""
    if max_model_len > spec.max_position_embeddings:
        positions = spec.max_position_embeddings
        raise ConfigError(f"`inference.max_model_len`={max_model_len} is beyond the {positions} positions of {name}; lower it")
