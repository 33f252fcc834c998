"""The rl component: policy gradient with an importance ratio and a trust region in probability space.

In: `RLInputs`, per-token arrays in which everything off the members is already 0.0. Out: `PolicyTerms`. The slot is
selectable: a variant is one named function `(RLInputs, its config) -> PolicyTerms` and one line in `RL_LOSSES`; one
that works on whole samples reduces over `segment_ids_BT`. A loss here does not divide: `losses.total` sums its terms
and divides by the step's member count.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax

from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig, LossConfig
from jaxrl.losses.importance import PolicyTerms, policy_terms, probability_gap


class RLInputs(NamedTuple):
    """What an rl loss may read; floats are 0.0 off the members, so no masked slot can reach a value or a gradient."""

    trainer_logprobs_BT: jax.Array
    """[B, T] float, logprobs under the current weights at the sampling temperature; the only differentiable input."""
    inference_logprobs_BT: jax.Array
    """[B, T] float, logprobs under the policy that sampled the token."""
    advantages_BT: jax.Array
    """[B, T] float, credit per token."""
    weights_BT: jax.Array
    """[B, T] float, scale of the token's whole term; never changes a count."""
    members_BT: jax.Array
    """[B, T] bool, tokens of this component."""
    segment_ids_BT: jax.Array
    """[B, T] int32, which sample a token belongs to, counted from 1 in each row; 0 is padding."""


def default_rl(inputs: RLInputs, config: DefaultLossConfig) -> PolicyTerms:
    """Drop tokens that already moved far in the direction of their advantage, by difference of probability (DPPO).

    term = -kept * adv_tau * A * r + kl_tau * d^2, with d = trainer - inference and r = exp(d). A token with A > 0 is
    dropped when its probability rose by more than `dppo_mask_high`, any other when it fell by more than
    `dppo_mask_low`; equality is kept. A dropped token still pays the squared log-ratio. The ratio is not clipped.

    Args:
      inputs: per-token arrays, 0.0 off the members.
      config: thresholds and scales.

    Returns:
      Weighted terms and the dropped members, split by the side that dropped them.

    Reference: Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning,
      https://arxiv.org/abs/2602.04879.
    """
    gap_BT = probability_gap(inputs.trainer_logprobs_BT, inputs.inference_logprobs_BT)
    is_credited_BT = inputs.advantages_BT > 0
    dropped_high_BT = inputs.members_BT & is_credited_BT & (gap_BT > config.dppo_mask_high)
    dropped_low_BT = inputs.members_BT & ~is_credited_BT & (gap_BT < -config.dppo_mask_low)
    return _terms_within(inputs, dropped_high_BT, dropped_low_BT, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def ipo_rl(inputs: RLInputs, config: IPOLossConfig) -> PolicyTerms:
    """Drop tokens whose probability moved far in either direction, whatever the sign of their advantage.

    The term is that of `default_rl`; a token is dropped when its probability moved by more than `ipo_threshold`;
    equality is kept.

    Args:
      inputs: per-token arrays, 0.0 off the members.
      config: threshold and scales.

    Returns:
      Weighted terms and the dropped members, split by the side that dropped them.
    """
    gap_BT = probability_gap(inputs.trainer_logprobs_BT, inputs.inference_logprobs_BT)
    dropped_high_BT = inputs.members_BT & (gap_BT > config.ipo_threshold)
    dropped_low_BT = inputs.members_BT & (gap_BT < -config.ipo_threshold)
    return _terms_within(inputs, dropped_high_BT, dropped_low_BT, adv_tau=config.adv_tau, kl_tau=config.kl_tau)


def _terms_within(inputs: RLInputs, dropped_high_BT: jax.Array, dropped_low_BT: jax.Array, *, adv_tau: float, kl_tau: float) -> PolicyTerms:
    """Policy-gradient terms of the members that neither side dropped."""
    terms_BT = policy_terms(
        inputs.trainer_logprobs_BT - inputs.inference_logprobs_BT,
        adv_tau * inputs.advantages_BT,
        inputs.weights_BT,
        inputs.members_BT & ~dropped_high_BT & ~dropped_low_BT,
        kl_tau=kl_tau,
    )
    return PolicyTerms(terms_BT, dropped_high_BT, dropped_low_BT)


RL_LOSSES: Mapping[str, Callable[[RLInputs, Any], PolicyTerms]] = {"default": default_rl, "ipo": ipo_rl}
"""The loss of the rl slot by `trainer.loss.type`."""


def rl_terms(inputs: RLInputs, config: LossConfig) -> PolicyTerms:
    """Compute the rl component with the loss that the configuration selects.

    Args:
      inputs: per-token arrays, 0.0 off the members.
      config: the configuration of one rl loss; its `type` selects the function.

    Returns:
      Weighted terms and the dropped members.
    """
    chex.assert_rank(inputs, 2)
    chex.assert_equal_shape(inputs)
    chex.assert_type(inputs, [float, float, float, float, bool, int])
    return RL_LOSSES[config.type](inputs, config)
