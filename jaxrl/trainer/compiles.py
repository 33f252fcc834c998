"""How many programs XLA has made in this process since counting began, and how many of them the compile cache had.

In: the compiler's own event stream (`jax.monitoring`). Out: the metrics `compile/count` and `compile/cache_hits`. A program is counted
whether it was compiled or read from the cache: after warm-up neither may happen, since a new shape costs seconds on CPU and minutes on an
accelerator. It does not say which program it was; `jax.log_compiles` does.
"""

from __future__ import annotations

import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Reported by JAX once per program, those from the compile cache included."""

CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""Reported by JAX once per program that came from the compile cache."""

_lock = threading.Lock()
_num_compiles = 0
_num_cache_hits = 0
_is_listening = False


def _listen_to_durations(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    global _num_compiles
    if event == COMPILE_EVENT:
        with _lock:
            _num_compiles += 1


def _listen_to_events(event: str, **kwargs: str | int) -> None:
    del kwargs
    global _num_cache_hits
    if event == CACHE_HIT_EVENT:
        with _lock:
            _num_cache_hits += 1


def num_compiles() -> int:
    """Return the number of programs made since the first call of this module's functions, in every thread of the process.

    The first call begins the counting and returns 0; JAX offers no way to end it for one listener, so it never does.

    Example:
      >>> import jax.numpy as jnp
      >>> before = num_compiles()
      >>> _ = jax.jit(lambda x: x * 3.25)(jnp.ones(3))
      >>> num_compiles() > before
      True
    """
    _listen_once()
    return _num_compiles


def num_cache_hits() -> int:
    """Return how many of `num_compiles` were read from the compile cache instead of being compiled."""
    _listen_once()
    return _num_cache_hits


def _listen_once() -> None:
    global _is_listening
    with _lock:
        if not _is_listening:
            jax.monitoring.register_event_duration_secs_listener(_listen_to_durations)
            jax.monitoring.register_event_listener(_listen_to_events)
            _is_listening = True
