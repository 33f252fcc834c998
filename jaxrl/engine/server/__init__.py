"""The engine's HTTP face: the OpenAI routes, tokens in and tokens out, health and metrics.

`Service` is the whole of it, an ASGI application over an `EmbeddedEndpoint`; `launch.serving` gives it a model and a
socket. Sampling, scheduling and stopping are the engine's.
"""

from jaxrl.engine.server.app import Backend, Service

__all__ = ["Backend", "Service"]
