"""What travels from the asyncio arm to the trainer and back: samples, micro-batches, train batches and step reports.

`TrainingSample` is one flat token sequence; `MicroBatch` is packed samples of one static shape `[rows, length]`;
`TrainBatch` is the micro-batches of one optimizer step with their member counts; `StepReport` is the trainer's answer.
`component_members` is the one membership rule that both the packer (numpy) and the losses (jax) call. Nothing here
packs, scores or computes a loss.

Stream conventions: index `t` of every array speaks of token `t`. A stream that is None is absent, and absent is the hot
path. There is no scalar advantage and no algorithm name on the wire: the trainer sees per-token streams only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

COMPONENTS = ("rl", "ce", "ref_kl")
"""The three loss components, in the order of every member count and denominator array."""

OPTIONAL_STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""Per-token float32 streams that may be absent (None) on a sample or micro-batch."""

STREAM_FILL: Mapping[str, float] = {
    "advantages": 0.0,
    "rl_weights": 1.0,
    "ce_weights": 0.0,
    "ref_kl_weights": 0.0,
    "ref_logprobs": 0.0,
}
"""Identity value of an absent stream on real tokens: what the packer writes for a sample that lacks a stream which a
neighbour in its micro-batch has, and what the trainer fills in where no sample has it. Padding gets 0.0 in every
stream."""


class TrainingSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One root-to-leaf branch of a rollout as flat arrays, every one of the full prompt+completion length `L`."""

    token_ids: np.ndarray
    """[L] int32."""
    loss_mask: np.ndarray
    """[L] bool, True where the policy sampled the token and it may be trained on."""
    inference_logprobs: np.ndarray
    """[L] float32, logprob under the distribution that sampled the token; 0.0 where nothing was sampled, and on every
    token of a frozen or demonstration source."""
    temperatures: np.ndarray
    """[L] float32, temperature at which token t was sampled; 1.0 elsewhere. The logits row that scores token t is
    divided by it."""
    env_name: str
    """Name of the environment that made the sample."""
    has_policy_logprobs: bool = True
    """False if somebody else than the policy sampled its tokens: they can feed the ce loss only."""
    advantages: np.ndarray | None = None
    """[L] float32, credit per token; 0.0 off the loss mask."""
    rl_weights: np.ndarray | None = None
    """[L] float32, scale of the rl term; absent means 1.0. Only tokens of the loss mask can be rl members, whatever it
    holds."""
    ce_weights: np.ndarray | None = None
    """[L] float32, scale of the cross-entropy term; absent means 0.0."""
    ref_kl_weights: np.ndarray | None = None
    """[L] float32, scale of the reference-KL term; absent means 0.0."""
    ref_logprobs: np.ndarray | None = None
    """[L] float32, temperature-1 logprob under the reference; required where `ref_kl_weights` is non-zero."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.token_ids.shape[0])

    def members(self, num_tokens: int | None = None) -> Members:
        """Say which of its first `num_tokens` tokens are in which loss component; None takes all."""
        weights = (self.rl_weights, self.ce_weights, self.ref_kl_weights)
        rl, ce, ref_kl = (None if stream is None else stream[:num_tokens] for stream in weights)
        loss_mask = self.loss_mask[:num_tokens]
        return component_members(loss_mask, rl, ce, ref_kl, np.ones(len(loss_mask), bool))


class MicroBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Packed samples in `R` rows (all shards together, shard-major) of `T` positions, `S` segments at most per row."""

    token_ids: np.ndarray
    """[R, T] int32; padding holds 0."""
    segment_ids: np.ndarray
    """[R, T] int32, 1..S in row order; 0 is padding."""
    position_ids: np.ndarray
    """[R, T] int32, restarting at 0 in every segment and in the padding."""
    loss_mask: np.ndarray
    """[R, T] bool."""
    inference_logprobs: np.ndarray
    """[R, T] float32."""
    temperatures: np.ndarray
    """[R, T] float32; 1.0 in padding."""
    sample_index: np.ndarray
    """[R, S] int32, the packed sample that segment s+1 holds; -1 where the row has fewer segments. Packed samples are
    numbered over the whole train batch, in the order in which they were given, those dropped as overlong left out."""
    advantages: np.ndarray | None = None
    """[R, T] float32 or absent."""
    rl_weights: np.ndarray | None = None
    """[R, T] float32 or absent."""
    ce_weights: np.ndarray | None = None
    """[R, T] float32 or absent."""
    ref_kl_weights: np.ndarray | None = None
    """[R, T] float32 or absent."""
    ref_logprobs: np.ndarray | None = None
    """[R, T] float32 or absent."""


class TrainBatch(msgspec.Struct, kw_only=True):
    """The micro-batches of one optimizer step."""

    step: int
    """1-based optimizer step that this batch is for."""
    micro_batches: list[MicroBatch]
    """At least one; all of one shape. Which optional streams are present may differ from one to the next."""
    member_counts: np.ndarray
    """[shards, 3] int32: member tokens of (rl, ce, ref_kl) in each shard's own slice of rows and positions, over all
    micro-batches."""
    num_samples: int
    """Samples packed: truncated ones count, dropped ones do not."""
    num_tokens: int
    """Real (non-padding) tokens packed."""
    num_loss_tokens: int
    """Tokens that are a member of at least one component."""
    overlong: list[int] = []
    """Samples that were longer than a row and were dropped or truncated, by the configured policy, as indices into the
    list that the packer was given. Where some were dropped this is another numbering than that of `sample_index`."""


class StepReport(msgspec.Struct, kw_only=True):
    """What the trainer says after step `step`."""

    step: int
    """The step that ran."""
    version: int
    """The policy version that exists now; equals `step`, also when the update was skipped."""
    skipped: bool
    """True if the gradient was not finite and the parameters were left as they were."""
    metrics: dict[str, float]
    """Scalars by metric name."""
    probe_logprobs: np.ndarray | None = None
    """Reserved for proofs of weight updates: the trainer's logprobs of the probe prompt."""
    token_logprobs: list[np.ndarray] | None = None
    """Per packed sample, [L] float32 trainer logprobs at the sampling temperature; None unless they were asked for."""


class Members(NamedTuple):
    """Boolean membership of every token in each loss component; same shape as the streams."""

    rl: Any
    ce: Any
    ref_kl: Any


def component_members(loss_mask: Any, rl_weights: Any, ce_weights: Any, ref_kl_weights: Any, is_real: Any) -> Members:
    """Say which tokens belong to which loss component; works on numpy and jax arrays alike.

    rl: `loss_mask` and `rl_weights != 0`. ce: `ce_weights != 0`. ref_kl: `ref_kl_weights != 0`; ce and ref_kl do not
    consult the loss mask. Membership is `!= 0`, so a negative weight is a member. Padding (`is_real` False) never is,
    whatever its streams hold.

    Args:
      loss_mask: bool array.
      rl_weights: float array, or None for absent (1.0 on the loss mask).
      ce_weights: float array, or None for absent (no member).
      ref_kl_weights: float array, or None for absent (no member).
      is_real: bool array, True on non-padding tokens.

    Returns:
      Three bool arrays of the common shape.

    Example:
      >>> m = component_members(np.array([False, True]), None, np.array([0.1, 0.0]), None, np.array([True, True]))
      >>> m.rl.tolist(), m.ce.tolist(), m.ref_kl.tolist()
      ([False, True], [True, False], [False, False])
    """
    rl = loss_mask & is_real if rl_weights is None else loss_mask & is_real & (rl_weights != 0)
    ce = is_real & ~is_real if ce_weights is None else is_real & (ce_weights != 0)
    ref_kl = is_real & ~is_real if ref_kl_weights is None else is_real & (ref_kl_weights != 0)
    return Members(rl=rl, ce=ce, ref_kl=ref_kl)
