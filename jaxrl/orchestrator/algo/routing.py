"""Which loss component the sampled tokens of a sample feed, and the rules that every stamped stream must keep.

In: a sample whose streams an algorithm may have written. Out: the same sample with its routing stamped, or a
`SampleError`. Streams that plain rl does not need stay absent, so the hot path ships nothing extra. Knows no algorithm
by name.
"""

from __future__ import annotations

import numpy as np

from jaxrl.config.algorithm import LossType
from jaxrl.errors import SampleError
from jaxrl.types import COMPONENTS, OPTIONAL_STREAMS, TrainingSample, component_members


def stamp_loss_routing(sample: TrainingSample, action_loss_type: LossType) -> None:
    """Send the mask-True tokens of `sample` to one loss component, in place.

    rl: nothing, because absent streams already mean that. ce: `rl_weights` 0 everywhere and `ce_weights` 1 on the loss
    mask; a ce stream that the algorithm wrote keeps its values elsewhere. ref_kl: `rl_weights` 0 everywhere and
    `ref_kl_weights` 1 on the loss mask.

    Args:
      sample: its `loss_mask` says which tokens the policy sampled.
      action_loss_type: the component.

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
    zeros = np.zeros(len(sample), np.float32)
    sample.rl_weights = zeros
    if action_loss_type == "ce":
        written = zeros if sample.ce_weights is None else sample.ce_weights
        sample.ce_weights = np.where(sample.loss_mask, np.float32(1.0), written).astype(np.float32)
    else:
        sample.ref_kl_weights = sample.loss_mask.astype(np.float32)


def check_streams(sample: TrainingSample, *, has_policy_logprobs: bool) -> None:
    """Refuse streams that the loss could not use.

    Args:
      sample: after `stamp_loss_routing`.
      has_policy_logprobs: False for a frozen or demonstration source, whose tokens carry no logprob of the policy.

    Raises:
      SampleError: a stream has another length or dtype than the tokens call for, or is not finite; a weight stands on
        the first token, which has no context; ref_kl members without `ref_logprobs`; rl or ref_kl members without the
        policy's own logprobs.
    """
    where = f"env {sample.env_name!r}"
    for name in OPTIONAL_STREAMS:
        stream = getattr(sample, name)
        if stream is None:
            continue
        if stream.shape != (len(sample),) or stream.dtype != np.float32:
            raise SampleError(
                f"{where}: `{name}` must be [{len(sample)}] float32, got {list(stream.shape)} {stream.dtype}"
            )
        if not np.isfinite(stream).all():
            raise SampleError(
                f"{where}: `{name}` is not finite at token {int(np.flatnonzero(~np.isfinite(stream))[0])}"
            )
    is_real = np.ones(len(sample), bool)
    members = component_members(sample.loss_mask, sample.rl_weights, sample.ce_weights, sample.ref_kl_weights, is_real)
    for name, member in zip(COMPONENTS, members, strict=True):
        if member[:1].any():
            raise SampleError(
                f"{where}: the first token is a member of the {name} loss, but nothing stands before it to predict it "
                "from"
            )
    if members.ref_kl.any() and sample.ref_logprobs is None:
        raise SampleError(
            f"{where}: `ref_kl_weights` are set but `ref_logprobs` is absent; the algorithm's hook must write both"
        )
    if not has_policy_logprobs and (members.rl.any() or members.ref_kl.any()):
        raise SampleError(
            f"{where}: tokens of a frozen source carry no logprob of the policy, so they can feed the ce loss only; "
            "use an algorithm whose `action_loss_type` is 'ce'"
        )
