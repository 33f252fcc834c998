"""From a configuration to wired objects, started and stopped in order: the only folder that names every concrete class.

`training` runs a `RunConfig` to its end and `serving` a `ServeConfig` until it is told to stop; `arrays` is the part of a
run that lives on devices, `side_by_side` keeps its two arms together, `compile_cache` keeps its programs, `preflight` looks
the chat template over. Nothing is decided here: each part has its own rules.
"""

from jaxrl.launch.arrays import ArrayArm, array_arm
from jaxrl.launch.training import Outcome, build_worlds, launch

__all__ = ["ArrayArm", "Outcome", "array_arm", "build_worlds", "launch"]
