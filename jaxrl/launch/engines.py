"""An engine by itself, without a trainer beside it: weights on a device, programs compiled, requests answered.

In: a model's spec and its published weights. Out: an engine that the device thread ticks, and its endpoint. Where weights come from is the
caller's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.engine.engine import Engine
from jaxrl.inference.rendering import Renderer
from jaxrl.models import ModelSpec
from jaxrl.weights.memory import WeightStore

logger = logging.getLogger(__name__)


@contextmanager
def device_thread(stop_deadline_s: float) -> Iterator[DeviceThread]:
    """Run a device thread for the body of the `with`.

    Raises:
      DeadlineError: it did not end in time.
    """
    device = DeviceThread("device")
    device.start()
    try:
        yield device
    finally:
        device.stop(stop_deadline_s)


def start_engine(
    spec: ModelSpec,
    store: WeightStore,
    config: EmbeddedInferenceConfig,
    renderer: Renderer,
    device: DeviceThread,
    progress: Callable[[str], None],
    *,
    max_logprobs: int = 0,
    includes_scoring: bool = True,
) -> tuple[Engine, EmbeddedEndpoint]:
    """Compile an engine for a model and have the device thread tick it; runs on that thread.

    Args:
      spec: the model's shapes.
      store: where its weights were published; the newest version is served.
      config: slots, window, precision.
      renderer: gives the engine its text.
      device: the thread that this runs on.
      progress: told of each program before it is compiled; may raise to stop.
      max_logprobs: the most alternatives per token that a request may ask for.
      includes_scoring: False compiles nothing that scores given tokens, as `Engine.warm_up` has it.
    """
    version = store.newest
    assert version is not None, "nothing was published"
    engine = Engine(spec, store.get(version), config, version=version, decode_text=renderer.decode, max_logprobs=max_logprobs)
    engine.warm_up(lambda name, done, total: progress(f"compiling {name} ({done + 1} of {total})"), includes_scoring=includes_scoring)

    def tick() -> None:
        try:
            engine.tick()
        except Exception:
            logger.exception("the engine failed; every request is refused from now on")
            raise

    device.attach_engine(engine.has_work, tick)
    return engine, EmbeddedEndpoint(engine, device, store)
