"""The learning-rate schedules, and AdamW with global-norm clipping.

In: `OptimizerConfig` and the length of the run. Out: a schedule (number of updates made so far -> learning rate) and an
optax transformation that gives a descent direction *before* the learning rate, so that a step can report the rate it
used and a skipped step can keep it. It does not decide whether an update is made: `trainer.step` does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.config.trainer import ConstantScheduleConfig, CosineScheduleConfig, LinearScheduleConfig, OptimizerConfig
from jaxrl.models.transformer import Params

STACKED_SUBTREE = "layers"
"""Top-level key of the parameters whose leaves carry a leading layer dimension."""
WARMUP_START_FRAC = 1e-8
"""With `min_lr` 0 a linear warm-up starts, and a linear decay ends, at this fraction of the peak."""


def build_schedule(config: OptimizerConfig, max_steps: int) -> optax.Schedule:
    """Build the learning-rate schedule of a run.

    Step k (1-based) uses `schedule(k - 1)` as long as no step was skipped; the argument is the number of updates made
    so far.

    Args:
      config: peak rate and shape of the schedule.
      max_steps: optimizer steps of the whole run, resumed parts included.

    Returns:
      A function from a count (int or int32 scalar) to the learning rate (float or float32 scalar).

    Example:
      >>> config = OptimizerConfig(lr=1.0, schedule=LinearScheduleConfig(warmup_steps=0, decay_steps=3, min_lr=0.5))
      >>> schedule = build_schedule(config, max_steps=4)
      >>> [float(schedule(k)) for k in range(4)]
      [1.0, 1.0, 0.75, 0.5]
    """
    shape = config.schedule
    if isinstance(shape, ConstantScheduleConfig):
        return _constant(config.lr, shape.warmup_steps)
    if isinstance(shape, LinearScheduleConfig):
        return _linear(config.lr, shape, max_steps)
    return _cosine(config.lr, shape, max_steps)


def _ramp(start: float, end: float, num_steps: int) -> optax.Schedule:
    """A straight line, exact at both ends in float32 also when one is tiny: `optax.linear_schedule` gives 0.0 there."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        frac = jnp.clip(jnp.asarray(count) / num_steps, 0.0, 1.0)
        return start * (1.0 - frac) + end * frac

    return schedule


def _constant(lr: float, warmup_steps: int) -> optax.Schedule:
    if warmup_steps <= 1:
        return optax.constant_schedule(lr)
    # lr * k / warmup_steps for the k-th step of the warm-up (1-based); from the last of them on, the peak.
    return _ramp(lr / warmup_steps, lr, warmup_steps - 1)


def _linear(lr: float, shape: LinearScheduleConfig, max_steps: int) -> optax.Schedule:
    floor = shape.min_lr or lr * WARMUP_START_FRAC
    schedules, boundaries = [optax.constant_schedule(lr)], []
    if shape.warmup_steps:
        schedules.insert(0, _ramp(floor, lr, shape.warmup_steps))
        boundaries.append(shape.warmup_steps)
    if shape.decay_steps:
        # One step of decay has no slope: it uses the floor at once. Otherwise the first decay step is at the peak and
        # the last at the floor.
        schedules.append(
            _ramp(lr, floor, shape.decay_steps - 1) if shape.decay_steps > 1 else optax.constant_schedule(floor)
        )
        boundaries.append(max_steps - shape.decay_steps)
    return optax.join_schedules(schedules, boundaries)


def _cosine(lr: float, shape: CosineScheduleConfig, max_steps: int) -> optax.Schedule:
    decay = optax.cosine_decay_schedule(lr, decay_steps=max_steps - shape.warmup_steps, alpha=shape.min_lr / lr)
    if not shape.warmup_steps:
        return decay
    floor = shape.min_lr or lr * WARMUP_START_FRAC
    warmup = _ramp(floor, lr, shape.warmup_steps)
    return optax.join_schedules([warmup, decay], [shape.warmup_steps])


def decay_mask(params: Params) -> dict[str, Any]:
    """Say which parameters are decayed: matrices, but no biases and no norm scales.

    Args:
      params: a parameter tree; leaves under its top-level key `layers` are stacked, so their first dimension is not
        counted.

    Returns:
      A tree of bool of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> decay_mask({"layers": {"norm": jnp.ones((2, 4)), "kernel": jnp.ones((2, 4, 4))}, "head": jnp.ones((8, 4))})
      {'head': True, 'layers': {'kernel': True, 'norm': False}}
    """

    def is_matrix(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        return leaf.ndim - (path[0].key == STACKED_SUBTREE) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Build AdamW with clipping, without the learning rate.

    Gradients, whose global norm `update` takes as `grad_norm`, are scaled down to a norm of `max_grad_norm`; it returns
    `m / (sqrt(v) + eps) + weight_decay * p` (bias-corrected moments, decay on matrices only). The new parameters are
    `p - lr * update`.

    Args:
      config: clipping, moments and weight decay.

    Returns:
      The transformation. Its moments have the structure of the parameters and are float32 whatever those are: in
      bfloat16 a second moment rounds away nearly all of the changes that `beta2` 0.999 makes.

    Reference: Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101.
    """
    chain = optax.chain(
        _clip(config.max_grad_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )

    def init(params: optax.Params) -> optax.OptState:
        return chain.init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))

    return optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(chain).update)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale by one number: dividing every entry, as `optax.clip_by_global_norm` does, makes XLA store the result."""

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        scale = jnp.where(extra["grad_norm"] < max_norm, 1.0, max_norm / extra["grad_norm"])
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(init, update)
