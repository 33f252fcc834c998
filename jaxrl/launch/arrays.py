"""The array arm of a run: the model on its devices, and the one thread that owns both its trainer and its engine.

In: a validated configuration, a mesh and, for a resume, a checkpoint. Out: an `ArrayArm` whose programs are compiled and
whose engine is warm, for the body of a `with`. It knows no environment and no event loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from jax.sharding import Mesh

from jaxrl.config.run import RunConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.engine import Engine
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering import Renderer
from jaxrl.models import ModelSpec, load_pretrained
from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.loop import ORCHESTRATOR_PART
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import StepPrograms, build_programs
from jaxrl.weights.memory import WeightStore

STOP_DEADLINE_S = 600.0
"""How long an orderly stop may take: the running step, a checkpoint, the device thread's last call."""

Progress = Callable[[str, float, float], None]
"""Called with a phase, how much of it is done, and how much there is."""


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
