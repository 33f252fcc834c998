"""Which loss component the sampled tokens of a sample feed, how much they count, and what every stream must be.

In: a sample whose streams an algorithm may have written. Out: the same sample with its routing stamped and its
environment's coefficients folded in, or a `SampleError`. Streams that plain rl does not need stay absent, so the hot
path ships nothing extra. Nothing here writes into an array that an algorithm wrote: it puts a new one in its place.
Knows no algorithm by name.
"""

from __future__ import annotations

import numpy as np

from jaxrl.config.algorithm import CoefficientsConfig, LossType
from jaxrl.errors import SampleError
from jaxrl.types import COMPONENTS, OPTIONAL_STREAMS, TrainingSample


def stamp_loss_routing(sample: TrainingSample, action_loss_type: LossType) -> None:
    """Send the mask-True tokens of `sample` to one loss component, in place.

    rl: nothing, because absent streams already mean that. ce: `rl_weights` 0 everywhere and `ce_weights` 1 on the loss
    mask. ref_kl: `rl_weights` 0 everywhere and `ref_kl_weights` 1 on the loss mask. Off the loss mask, ce and ref_kl
    weights that the algorithm wrote stay; a component that is not `action_loss_type` keeps all that was written.

    Args:
      sample: its `loss_mask` says which tokens the policy sampled.
      action_loss_type: the component.

    Raises:
      SampleError: the weights to merge with are no [L] float32 stream of finite numbers.

    Example:
      >>> sample = TrainingSample(token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]),
      ...                         inference_logprobs=np.zeros(3, np.float32), temperatures=np.ones(3, np.float32),
      ...                         env_name="toy")
      >>> stamp_loss_routing(sample, "ce")
      >>> sample.ce_weights.tolist(), sample.rl_weights.tolist(), sample.ref_kl_weights
      ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0], None)
    """
    if action_loss_type == "rl":
        return
    sample.rl_weights = np.zeros(len(sample), np.float32)
    name = f"{action_loss_type}_weights"
    written = _checked_stream(sample, name)
    setattr(sample, name, np.where(sample.loss_mask, np.float32(1.0), np.float32(0.0) if written is None else written))


def fold_coefficients(sample: TrainingSample, coefficients: CoefficientsConfig) -> None:
    """Multiply the weights of a sample's tokens by its environment's coefficients, in place.

    A coefficient of 1 changes nothing, so absent streams stay absent. Another rl coefficient writes `rl_weights` on the
    loss mask, the coefficient times what was written or else 1; ce and ref_kl weights are multiplied where there are
    any. 0 takes the tokens out of the component, and a weight of 0 stays 0: tokens that feed ce never come to feed rl.

    Args:
      sample: after `stamp_loss_routing`.
      coefficients: of the sample's environment.

    Raises:
      SampleError: the weights to multiply are no [L] float32 stream of finite numbers, or a product is too large or too
        small for float32.

    Example:
      >>> sample = TrainingSample(token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]),
      ...                         inference_logprobs=np.zeros(3, np.float32), temperatures=np.ones(3, np.float32),
      ...                         env_name="toy", ce_weights=np.array([0.0, 0.5, 0.0], np.float32))
      >>> fold_coefficients(sample, CoefficientsConfig(rl=0.25, ce=4.0))
      >>> sample.rl_weights.tolist(), sample.ce_weights.tolist(), sample.ref_kl_weights
      ([0.0, 0.25, 0.25], [0.0, 2.0, 0.0], None)
    """
    for component in COMPONENTS:
        coefficient = getattr(coefficients, component)
        if coefficient == 1:
            continue
        name = f"{component}_weights"
        written = _checked_stream(sample, name)
        if component == "rl":
            written = np.where(sample.loss_mask, 1.0 if written is None else written, 0.0)
        if written is None:
            continue
        with np.errstate(over="ignore", under="ignore"):
            folded = (coefficient * written.astype(np.float64)).astype(np.float32)
        # Invariant: only 0 takes a token out. Devices flush subnormal numbers to 0, so those are lost as well.
        is_kept = np.isfinite(folded) & (np.abs(folded) >= np.finfo(np.float32).tiny)
        if coefficient != 0 and not is_kept[written != 0].all():
            raise SampleError(
                f"env {sample.env_name!r}: `coefficients.{component}`={coefficient:g} takes a weight in `{name}` out of the range of "
                "float32; use one nearer to 1, or 0 to leave the component out"
            )
        setattr(sample, name, folded)


def check_streams(sample: TrainingSample) -> None:
    """Refuse streams that the loss could not use.

    Args:
      sample: after `stamp_loss_routing` and `fold_coefficients`.

    Raises:
      SampleError: a stream has another length or dtype than the tokens call for, or is not finite; a weight stands on
        the first token, which has no context; ref_kl members without `ref_logprobs`, or that the policy did not sample;
        rl or ref_kl members without the policy's own logprobs; rl members without `advantages`.
    """
    where = f"env {sample.env_name!r}"
    for name in OPTIONAL_STREAMS:
        _checked_stream(sample, name)
    members = sample.members()
    for name, member in zip(COMPONENTS, members, strict=True):
        if member[:1].any():
            raise SampleError(f"{where}: the first token is a member of the {name} loss, but nothing stands before it to predict it from")
    if members.ref_kl.any() and sample.ref_logprobs is None:
        raise SampleError(f"{where}: `ref_kl_weights` are set but `ref_logprobs` is absent; the algorithm's hook must write both")
    if (members.ref_kl & ~sample.loss_mask).any():
        at = int(np.flatnonzero(members.ref_kl & ~sample.loss_mask)[0])
        raise SampleError(
            f"{where}: `ref_kl_weights` is set at token {at}, which is not in the loss mask: nobody sampled it, so it has no importance "
            "ratio; write `ce_weights` there, or nothing"
        )
    if not sample.has_policy_logprobs and (members.rl.any() or members.ref_kl.any()):
        raise SampleError(
            f"{where}: tokens that the policy did not sample carry no logprob of it, so they can feed the ce loss only; use an algorithm "
            "whose `action_loss_type` is 'ce'"
        )
    if members.rl.any() and sample.advantages is None:
        raise SampleError(
            f"{where}: it has live rl tokens but no `advantages`; the algorithm's `score_group` must call `assign_advantages` on every "
            "rollout (0 is credit too), or its `action_loss_type` must name another loss"
        )


def _checked_stream(sample: TrainingSample, name: str) -> np.ndarray | None:
    """Return a stream that is absent, or one finite float32 number per token."""
    stream = getattr(sample, name)
    if stream is None:
        return None
    where = f"env {sample.env_name!r}: `{name}`"
    if not isinstance(stream, np.ndarray) or stream.shape != (len(sample),) or stream.dtype != np.float32:
        got = f"{list(stream.shape)} {stream.dtype}" if isinstance(stream, np.ndarray) else f"a {type(stream).__name__}"
        raise SampleError(f"{where} must be [{len(sample)}] float32, got {got}")
    if not np.isfinite(stream).all():
        raise SampleError(f"{where} is not finite at token {int(np.flatnonzero(~np.isfinite(stream))[0])}")
    return stream
