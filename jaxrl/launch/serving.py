"""From a `ServeConfig` to a running server, started and stopped in order.

In: a validated configuration. Out: a server on a socket until Ctrl-C. What can fail without a device (tokenizer, key, port) comes
first; then the socket listens and /health tells how far loading is, while the device thread loads and compiles; then it serves.
The first Ctrl-C refuses new requests and lets those that are in go on, up to a deadline; the second ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import uvicorn

from jaxrl.config.serve import ServeConfig, ServerConfig
from jaxrl.devices import DeviceThread
from jaxrl.engine.server import Backend, Service
from jaxrl.errors import ConfigError
from jaxrl.inference.frozen import api_key
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.known_models import load_renderer
from jaxrl.launch.arrays import check_window
from jaxrl.launch.compile_cache import use_compile_cache
from jaxrl.launch.engines import device_thread, start_engine
from jaxrl.launch.side_by_side import ctrl_c
from jaxrl.models import load_pretrained
from jaxrl.weights.memory import WeightStore

KEEP_ALIVE_S = 60
"""How long an idle connection stays open: clients keep theirs in pools."""

Say = Callable[[str], None]
"""Shows a line to the person who started the server."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that serves."""

    url: str
    """Base URL of the OpenAI routes, ending in `/v1`."""
    backend: Backend
    service: Service
    device: DeviceThread
    """The thread that owns the model."""
    request_stop: Callable[[], object]
    """Does what the first Ctrl-C does; callable from any thread."""


def serve(config: ServeConfig, say: Say, on_ready: Callable[[Running], None] | None = None) -> None:
    """Serve until Ctrl-C.

    Args:
      config: the server.
      say: shows what is going on, a line at a time.
      on_ready: called in the event loop once requests are served.

    Raises:
      ConfigError, ModelLoadError: the model, the key or the address cannot be used.
      DeadlineError: the device thread did not end in time.
    """
    renderer = load_renderer(config.model.name, renderer=config.model.renderer, tool_format=config.model.tool_format)
    service = Service(config, api_key(config.server.api_key_var, os.environ, "server.api_key_var"))
    use_compile_cache(is_on=config.server.compile_cache, directory=config.server.compile_cache_dir)
    with contextlib.closing(_listen(config.server)) as listener, device_thread(config.server.shutdown_deadline_s) as device:
        try:
            asyncio.run(_serve(config, service, renderer, listener, device, say, on_ready))
        finally:
            service.close()


async def _serve(
    config: ServeConfig,
    service: Service,
    renderer: Renderer,
    listener: socket.socket,
    device: DeviceThread,
    say: Say,
    on_ready: Callable[[Running], None] | None,
) -> None:
    """Listen at once, load beside it, and end both together."""
    loop = asyncio.get_running_loop()
    server = _Uvicorn(
        uvicorn.Config(
            service,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.server.shutdown_deadline_s),
        )
    )

    def stop() -> None:
        service.stop_admitting()
        server.should_exit = True

    def progress(detail: str) -> None:
        if server.should_exit:
            raise _Interrupted
        service.say_loading(detail)
        say(detail)

    async def load() -> None:
        backend = await asyncio.wrap_future(device.submit(load_backend, config, renderer, device, progress, kind="engine"))
        if server.should_exit:
            return
        service.attach(backend)
        url, engine = _url_of(listener), config.engine
        say(f"serving {config.served_name!r} at {url} ({engine.num_slots} slots, window {engine.max_model_len}); Ctrl-C stops")
        if on_ready is not None:
            on_ready(Running(url, backend, service, device, partial(loop.call_soon_threadsafe, stop)))

    draining = f"stopping: requests that are in have {config.server.shutdown_deadline_s:g} s; Ctrl-C again ends at once"
    with ctrl_c(stop, lambda _: say(draining), lambda: None):
        say(f"listening at {_url_of(listener)}; loading {config.model.name}")
        loading = asyncio.create_task(load())
        loading.add_done_callback(lambda task: stop() if task.cancelled() or task.exception() else None)
        await server.serve(sockets=[listener])
        with contextlib.suppress(_Interrupted):
            await loading


def load_backend(config: ServeConfig, renderer: Renderer, device: DeviceThread, progress: Say) -> Backend:
    """Load a model and compile its engine; runs on the device thread, which then ticks it.

    Args:
      config: the server.
      renderer: gives the engine its text.
      device: the thread that this runs on.
      progress: told of each phase; may raise to stop.
    """
    progress(f"loading the weights of {config.model.name}")
    model, params = load_pretrained(config.model.name, param_dtype=config.engine.dtype)
    check_window(config.model.name, config.engine.max_model_len, model.spec)
    store = WeightStore(model.spec, config.engine.dtype, num_versions=1, device=jax.local_devices()[0])
    store.publish(0, params)
    del params
    max_logprobs = config.server.max_logprobs
    engine, endpoint = start_engine(model.spec, store, config.engine, renderer, device, progress, max_logprobs=max_logprobs)
    return Backend(engine, endpoint, renderer)


class _Interrupted(Exception):
    """Loading was given up."""


class _Uvicorn(uvicorn.Server):
    """A uvicorn that leaves signals to `ctrl_c`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _listen(config: ServerConfig) -> socket.socket:
    """Return a bound socket.

    Raises:
      ConfigError: the address is in use, not of this machine, or not allowed.
    """
    where = f"`server.host`={config.host!r}, `server.port`={config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"{where}: there is no such address ({error}); 127.0.0.1 is this machine alone, 0.0.0.0 all its networks"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        hints = {
            errno.EADDRINUSE: "another program listens there; stop it, or choose another port (`--server.port 0` takes a free one)",
            errno.EACCES: "this user may not bind to that port; choose one above 1023",
            errno.EADDRNOTAVAIL: "the address is none of this machine's",
        }
        raise ConfigError(f"{where}: {hints.get(error.errno or 0, str(error))}") from error
    return listener


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
