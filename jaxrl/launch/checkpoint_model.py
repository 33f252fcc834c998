"""The model of a checkpoint in an engine of this process, to be measured: the array arm of an evaluation.

In: a Hugging Face directory, or a run's configuration and a step. Out: an endpoint that answers for the body of a `with`. Of a run's
checkpoint the parameters alone are read; tokenizer and shapes are those of the model that the run started from.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxrl.config.checkpoints import CHECKPOINTS, RunCheckpoint
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.run import RunConfig
from jaxrl.config.trainer import MeshConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.errors import ConfigError
from jaxrl.inference.hub import resolve_model_directory
from jaxrl.inference.rendering import Renderer
from jaxrl.launch.arrays import check_window
from jaxrl.launch.compile_cache import use_compile_cache
from jaxrl.launch.engines import device_thread, start_engine
from jaxrl.models import ModelSpec, build_mesh, build_model, load_pretrained, load_spec
from jaxrl.trainer.checkpoint import MANIFEST, PARTS, Checkpointer, complete_steps
from jaxrl.weights.memory import WeightStore

STOP_DEADLINE_S = 60.0
"""How long the device thread may take to end: what it does is at most one program's compilation or one decode step."""
_SAMPLE_BYTES = 1 << 16
"""What is read of either end of a file to tell weights apart."""


@contextlib.contextmanager
def checkpoint_model(
    name: str,
    checkpoint: RunCheckpoint | None,
    run: RunConfig | None,
    step: int,
    engine: EmbeddedInferenceConfig,
    renderer: Renderer,
    progress: Callable[[str], None],
) -> Iterator[EmbeddedEndpoint]:
    """Load a model, compile its engine, and let it answer for the body of the `with`.

    Args:
      name: the model directory, or the one that the run started from.
      checkpoint: which checkpoint of a run; None takes the directory's own weights.
      run: the run's configuration, if there is a checkpoint.
      step: which step, as `step_of` says; also the policy version that is served. 0 for a model directory.
      engine: slots, window, precision.
      renderer: gives the engine its text.
      progress: told of each phase.

    Raises:
      ConfigError: the window is longer than the model's.
      ModelLoadError, CheckpointError: the weights cannot be read.
      DeadlineError: the device thread did not end in time.
    """
    spec = load_spec(name)
    check_window(name, engine.max_model_len, spec)
    use_compile_cache()
    with device_thread(STOP_DEADLINE_S) as device:
        yield device.run(_start, name, spec, checkpoint, run, step, engine, renderer, device, progress, kind="engine")


def step_of(checkpoint: RunCheckpoint) -> int:
    """Return the step of a run's checkpoint: the one that was named, or the newest complete one.

    Raises:
      ConfigError: there is no such complete checkpoint.
    """
    steps = complete_steps(checkpoint.run_dir / CHECKPOINTS)
    if checkpoint.step is None and steps:
        return steps[-1]
    if checkpoint.step not in steps:
        which = "no complete checkpoint" if checkpoint.step is None else f"no complete checkpoint of step {checkpoint.step}"
        raise ConfigError(f"`--checkpoint`: the run {checkpoint.run_dir} has {which}; complete are {', '.join(map(str, steps)) or 'none'}")
    return checkpoint.step


def weights_of(
    name: str, spec: ModelSpec, checkpoint: RunCheckpoint | None, run: RunConfig | None, step: int, dtype: str
) -> dict[str, Any]:
    """Return the parameters of a checkpoint; of a run's, nothing else is read.

    Args:
      name: the model directory, or the one that the run started from.
      spec: its shapes.
      checkpoint: which checkpoint of a run; None takes the directory's own weights.
      run: the run's configuration, if there is a checkpoint.
      step: which step.
      dtype: precision of a directory's weights; a run's are as it kept them.

    Raises:
      ModelLoadError, CheckpointError: they cannot be read, or are of another model.
    """
    if checkpoint is None or run is None:
        return load_pretrained(name, param_dtype=dtype)[1]
    mesh = build_mesh(MeshConfig(), jax.local_devices()[:1])
    abstract = build_model(spec, mesh).abstract_params(run.trainer.param_dtype)
    checkpointer = Checkpointer(checkpoint.run_dir / CHECKPOINTS, run.trainer.checkpoint.keep_last, mesh)
    state, _ = checkpointer.restore(step, {"params": abstract}, is_part=True)
    return state["params"]


def weights_id(name: str, checkpoint: RunCheckpoint | None, step: int) -> str:
    """Return a short name for the weights that a checkpoint holds, so that a folder is not gone on with under others.

    Of each file its size, its first and its last bytes count: any training changes those.

    Args:
      name: the model directory, or its name on the hub.
      checkpoint: which checkpoint of a run; None takes the directory's own weights.
      step: which step.
    """
    if checkpoint is not None:
        files = [checkpoint.run_dir / CHECKPOINTS / f"step_{step:06d}" / PARTS / MANIFEST]
    else:
        files = sorted(resolve_model_directory(name, "weights").glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name}\x1f{size}\x1f".encode() + file.read(_SAMPLE_BYTES))
            file.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:8]


def _start(
    name: str,
    spec: ModelSpec,
    checkpoint: RunCheckpoint | None,
    run: RunConfig | None,
    step: int,
    engine: EmbeddedInferenceConfig,
    renderer: Renderer,
    device: DeviceThread,
    progress: Callable[[str], None],
) -> EmbeddedEndpoint:
    """Runs on the device thread."""
    store = WeightStore(spec, engine.dtype, num_versions=1, device=jax.local_devices()[0])
    where = name if checkpoint is None else f"step {step} of {checkpoint.run_dir}"
    progress(f"loading {where}")
    store.publish(step, weights_of(name, spec, checkpoint, run, step, engine.dtype))
    return start_engine(spec, store, engine, renderer, device, progress, includes_scoring=False)[1]
