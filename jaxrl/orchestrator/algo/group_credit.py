"""Credit by the mean of a group, written into its rollouts: what the algorithms share that build on it.

In: the survivors of a group, and settings of credit. Out: the same rollouts with their advantages assigned, one for a whole
rollout or one for each turn. The arithmetic is in `advantage`; nothing here stamps where a token goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.batching import trainable_branches
from jaxrl.config.algorithm import GroupMeanConfig, LengthPenaltyConfig, TurnsPenaltyConfig
from jaxrl.errors import SampleError
from jaxrl.orchestrator.algo.advantage import efficiency_advantages, group_mean_advantages, turn_advantages
from jaxrl.orchestrator.algo.base import assign_each
from jaxrl.types import Boundary, Rollout


def credit_by_group_mean(rollouts: Sequence[Rollout], config: GroupMeanConfig) -> None:
    """Assign each rollout its reward minus the group's mean, or each of its turns what that and the later ones earned above it.

    Where turns are credited, a rollout without a reward for each turn fails alone (boundary `algorithm`); the others are
    compared without it.

    Args:
      rollouts: G survivors of a group, in member order, not frozen.
      config: which rewards are compared, and whether cheap rollouts are favoured.
    """
    if config.credit == "turn":
        _credit_turns(rollouts)
        return
    rewards_G = [rollout.score for rollout in rollouts]
    penalty = config.length_penalty
    if penalty is None:
        advantages_G = group_mean_advantages(rewards_G)
    else:
        advantages_G = efficiency_advantages(rewards_G, [_cost(rollout, penalty) for rollout in rollouts])
    assign_each(rollouts, advantages_G)


def spread_turns(rollout: Rollout, values_K: np.ndarray) -> np.ndarray:
    """Return one number per token of a rollout's samples, laid end to end: that of the turn in which the token was sampled.

    Args:
      rollout: its samples are made.
      values_K: [K] float, one number for each policy turn, in the order of the sampled nodes.

    Returns:
      [total] float32, 0 off the loss masks. A turn that several branches share has its number in the one that trains it.
    """
    is_turn = np.array([node.sampled for node in rollout.nodes])
    turn_of_node = np.cumsum(is_turn) - 1
    parts: list[np.ndarray] = []
    for branch, sample in zip(trainable_branches(rollout), rollout.samples, strict=True):
        values = [values_K[turn_of_node[index]] if is_turn[index] else 0.0 for index in branch.path]
        per_token = np.repeat(np.asarray(values, np.float32), [len(rollout.nodes[index].token_ids) for index in branch.path])
        parts.append(np.where(sample.loss_mask, per_token, np.float32(0.0)))
    return np.concatenate(parts)


def _credit_turns(rollouts: Sequence[Rollout]) -> None:
    rewarded: list[tuple[Rollout, list[float]]] = []
    for rollout in rollouts:
        rewards_K = rollout.turn_rewards
        if rewards_K is not None and len(rewards_K) == rollout.num_turns:
            rewarded.append((rollout, rewards_K))
            continue
        got = "no rewards of turns" if rewards_K is None else f"{len(rewards_K)} rewards of turns"
        rollout.fail(
            Boundary.ALGORITHM,
            SampleError(
                f"env {rollout.env_name!r}, task {rollout.task.id!r}: `credit`='turn' needs a reward for each of its {rollout.num_turns} "
                f"policy turns, and the environment gave {got} (`Outcome.turn_rewards`); let it give them, or use `credit`='rollout'"
            ),
        )
    for (rollout, _), advantages_K in zip(rewarded, turn_advantages([rewards_K for _, rewards_K in rewarded]), strict=True):
        rollout.assign_advantages(spread_turns(rollout, advantages_K))


def _cost(rollout: Rollout, penalty: LengthPenaltyConfig) -> float:
    """Return what a rollout cost: its turns, or its weighted tokens, each counted once however many branches hold it."""
    if isinstance(penalty, TurnsPenaltyConfig):
        return float(rollout.num_turns)
    tool_tokens = sum(len(node.token_ids) for node in rollout.nodes if node.role == "tool" and not node.is_retold)
    return penalty.completion_weight * rollout.num_completion_tokens + penalty.tool_response_weight * tool_tokens
