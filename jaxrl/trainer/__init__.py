"""The update: state, optimizer, compiled step, checkpoints and the loop that turns train batches into policy versions.

Losses and models are below, transport and orchestration elsewhere: nothing here knows where a batch comes from.
"""

from jaxrl.trainer.checkpoint import Checkpointer
from jaxrl.trainer.compiles import num_compiles
from jaxrl.trainer.loop import Trainer
from jaxrl.trainer.state import Accumulator, TrainState
from jaxrl.trainer.step import StepPrograms, build_programs, densify

__all__ = [
    "Accumulator",
    "Checkpointer",
    "StepPrograms",
    "TrainState",
    "Trainer",
    "build_programs",
    "densify",
    "num_compiles",
]
