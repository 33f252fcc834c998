"""From a configuration to wired objects, started and stopped in order: the only folder that names every concrete class.

`training` runs a `RunConfig` to its end; `arrays` is the part of it that lives on devices; `side_by_side` keeps the two
arms together. Nothing is decided here: each part has its own rules.
"""

from jaxrl.launch.arrays import ArrayArm, array_arm
from jaxrl.launch.training import Outcome, build_worlds, launch, refuse_many_processes

__all__ = ["ArrayArm", "Outcome", "array_arm", "build_worlds", "launch", "refuse_many_processes"]
