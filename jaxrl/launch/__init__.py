"""From a configuration to wired objects, started and stopped in order: the only folder that names every concrete class.

`training` runs a `RunConfig` to its end, `serving` a `ServeConfig` until it is told to stop, and `evaluating` measures a model on an
environment; `arrays` is the part of a run that lives on devices, `checkpoint_model` that of an evaluation, `engines` what it and a server
share, `measuring` evaluates in training, `side_by_side` keeps the two arms of a run together, `compile_cache` keeps its programs,
`preflight` looks the chat template over.
Nothing is decided here: each part has its own rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.launch.arrays import ArrayArm, array_arm
    from jaxrl.launch.training import Outcome, build_worlds, launch

__all__ = ["ArrayArm", "Outcome", "array_arm", "build_worlds", "launch"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: an evaluation of a served model needs no JAX."""
    if name in ("ArrayArm", "array_arm"):
        from jaxrl.launch import arrays

        return getattr(arrays, name)
    if name in __all__:
        from jaxrl.launch import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
