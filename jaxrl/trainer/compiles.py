"""How many programs XLA has compiled in this process since counting began.

In: the compiler's own event stream (`jax.monitoring`). Out: one number, the metric `compile/count`. After warm-up it
must not move: a new shape costs seconds on CPU and minutes on an accelerator. It does not say which program was
compiled; `jax.log_compiles` does.
"""

from __future__ import annotations

import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Reported by JAX once per compiled program."""

_lock = threading.Lock()
_num_compiles = 0
_is_listening = False


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    global _num_compiles
    if event == COMPILE_EVENT:
        with _lock:
            _num_compiles += 1


def num_compiles() -> int:
    """Return the number of programs compiled since the first call of this function, in every thread of the process.

    The first call begins the counting and returns 0; JAX offers no way to end it for one listener, so it never does.

    Example:
      >>> import jax.numpy as jnp
      >>> before = num_compiles()
      >>> _ = jax.jit(lambda x: x * 3.25)(jnp.ones(3))
      >>> num_compiles() > before
      True
    """
    global _is_listening
    with _lock:
        if not _is_listening:
            jax.monitoring.register_event_duration_secs_listener(_listen)
            _is_listening = True
        return _num_compiles
