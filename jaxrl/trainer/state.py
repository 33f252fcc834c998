"""What the trainer keeps between steps, and what it adds up within one.

`TrainState` is everything that a checkpoint of the trainer holds; `Accumulator` lives for one step. Both are pytrees of
arrays that go in and out of the programs of `trainer.step` and are donated to them. Neither holds a schedule, a model
or a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax

from jaxrl.losses import MetricSums
from jaxrl.models.transformer import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The policy and its optimizer after `step` steps."""

    params: Params
    """Master parameters, in `trainer.param_dtype`."""
    opt_state: optax.OptState
    """Moments, in float32, and the number of updates."""
    step: jax.Array
    """int32 scalar, steps done: also the policy version of `params`."""
    num_skipped: jax.Array
    """int32 scalar, steps among them without an update because the gradient was not finite."""
    num_empty: jax.Array
    """int32 scalar, steps among them without an update because no token was a member of any loss component."""

    @property
    def num_updates(self) -> jax.Array:
        """int32 scalar, updates made: the argument of the learning-rate schedule."""
        return self.step - self.num_skipped - self.num_empty


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulator:
    """Sums over the micro-batches of one step."""

    grads: Params
    """float32, gradient of the objective so far; every micro-batch's share is divided by the counts of the whole
    step."""
    metrics: MetricSums
    """Metrics so far, as sums that are divided once, at the end of the step."""
