"""Turns the message graph of a rollout into flat training samples, one per branch.

In: a `Rollout` whose nodes hold exact token ids. Out: one `TrainingSample` for each leaf whose path has something left
to train on. A sampled node that several branches share is trained in the first of them and is context in the others.
Weight streams are left absent: stamping them is the algorithm's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxrl.errors import SampleError
from jaxrl.types import Branch, Node, Rollout, TrainingSample


@dataclass(frozen=True, slots=True)
class _NodeArrays:
    """A node's per-token arrays, all of length `len(node.token_ids)`."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    temperatures: np.ndarray


def rollout_to_samples(rollout: Rollout) -> list[TrainingSample]:
    """Return one flat sample per trainable branch, in the order of `trainable_branches`.

    A live policy's sampled token always carries its own sampling logprob: a missing one is an error, never 0.0. A
    frozen or demonstration source (`Node.versions` is None) has no policy logprob to carry, so its samples hold 0.0
    there, say so (`has_policy_logprobs`), and must be given no rl or ref_kl weight: on the wire they cannot be told from a
    live token of probability 1.

    Args:
      rollout: any rollout, scored or not; it is not changed.

    Returns:
      Samples with `token_ids` int32, `loss_mask` bool, `inference_logprobs` and `temperatures` float32, every stream
      absent. Empty if nothing was sampled.

    Raises:
      SampleError: a node's arrays disagree in length, a sampling logprob is missing or not finite, a token that nobody
        sampled is in the loss mask, or the first token of a branch is (it has no context to be predicted from).

    Example:
      >>> from jaxrl.types import Task
      >>> prompt = Node(None, "user", "hi", np.array([5, 6]))
      >>> reply = Node(0, "assistant", "yo", np.array([7, 8]), sampled=True, num_sampled=1,
      ...              logprobs=np.array([-0.25]), versions=np.array([3]))
      >>> rollout = Rollout(Task("toy", "0", {}), "toy/0", member=0, draw_index=0, nodes=[prompt, reply])
      >>> sample, = rollout_to_samples(rollout)
      >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.inference_logprobs.tolist()
      ([5, 6, 7, 8], [False, False, False, True], [0.0, 0.0, 0.0, -0.25])
    """
    arrays = [_node_arrays(rollout, index) for index in range(len(rollout.nodes))]
    return [_branch_sample(rollout, branch, arrays) for branch in rollout.branches() if any(branch.trained)]


def trainable_branches(rollout: Rollout) -> list[Branch]:
    """Return the branches that yield a sample, in leaf order: entry `i` is the path of `rollout.samples[i]`.

    Whoever scores or filters by branch (a teacher, an observation filter) iterates over this, so that indices agree.

    Args:
      rollout: any rollout.

    Returns:
      One `Branch` per sample of `rollout_to_samples(rollout)`.

    Raises:
      SampleError: as `rollout_to_samples`.
    """
    for index in range(len(rollout.nodes)):
        _node_arrays(rollout, index)  # raises
    return [branch for branch in rollout.branches() if any(branch.trained)]


def _branch_sample(rollout: Rollout, branch: Branch, arrays: list[_NodeArrays]) -> TrainingSample:
    parts = [arrays[index] for index in branch.path]
    loss_mask = np.concatenate(
        [
            a.loss_mask if trained else np.zeros_like(a.loss_mask)
            for a, trained in zip(parts, branch.trained, strict=True)
        ]
    )
    if loss_mask[0]:
        raise SampleError(
            f"{_where(rollout, branch.path[0])}: the first token of a branch is in the loss mask; it has no context to "
            "be predicted from, so a rollout must start with at least one token that was not sampled"
        )
    return TrainingSample(
        token_ids=np.concatenate([a.token_ids for a in parts]),
        loss_mask=loss_mask,
        inference_logprobs=np.concatenate([a.logprobs for a in parts]),
        temperatures=np.concatenate([a.temperatures for a in parts]),
        env_name=rollout.env_name,
        has_policy_logprobs=not any(
            trained and rollout.nodes[index].versions is None for index, trained in zip(branch.path, branch.trained, strict=True)
        ),
    )


def _node_arrays(rollout: Rollout, index: int) -> _NodeArrays:
    """Check one node and spread its compact per-sampled-token arrays over its tokens."""
    node = rollout.nodes[index]
    num_tokens = len(node.token_ids)
    where = _where(rollout, index)
    if node.parent is not None and not 0 <= node.parent < index:
        raise SampleError(f"{where}: `parent`={node.parent!r} must be an earlier node (0..{index - 1}) or None")
    if not 0 <= node.num_sampled <= (num_tokens if node.sampled else 0):
        raise SampleError(
            f"{where}: `num_sampled`={node.num_sampled!r} does not fit a node of {num_tokens} tokens with "
            f"`sampled`={node.sampled!r}"
        )
    is_sampled = np.arange(num_tokens) >= num_tokens - node.num_sampled
    loss_mask = is_sampled if node.loss_mask is None else np.asarray(node.loss_mask, bool)
    if loss_mask.shape != (num_tokens,):
        raise SampleError(f"{where}: `loss_mask` has shape {loss_mask.shape}, expected ({num_tokens},)")
    if np.any(loss_mask & ~is_sampled):
        raise SampleError(
            f"{where}: `loss_mask` is True on a token that nobody sampled; it may only narrow the sampled tail"
        )
    logprobs = np.zeros(num_tokens, np.float32)
    temperatures = np.ones(num_tokens, np.float32)
    if node.num_sampled:
        is_live = node.versions is not None
        if is_live:
            logprobs[is_sampled] = _sampling_logprobs(node, where)
        temperatures[is_sampled] = _temperature(node, is_live, where)
    return _NodeArrays(np.asarray(node.token_ids, np.int32), loss_mask, logprobs, temperatures)


def _sampling_logprobs(node: Node, where: str) -> np.ndarray:
    """Return the [num_sampled] logprobs of a live policy's node, all present and finite."""
    if node.versions is None or len(node.versions) != node.num_sampled:
        got = None if node.versions is None else len(node.versions)
        raise SampleError(f"{where}: expected one policy version per sampled token ({node.num_sampled}), got {got}")
    if node.logprobs is None:
        raise SampleError(f"{where}: {node.num_sampled} tokens of the live policy came without sampling logprobs")
    logprobs = np.asarray(node.logprobs, np.float32)
    if logprobs.shape != (node.num_sampled,):
        raise SampleError(
            f"{where}: expected one logprob per sampled token ({node.num_sampled}), got shape {logprobs.shape}"
        )
    if not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise SampleError(f"{where}: the logprob of sampled token {at} is {float(logprobs[at])!r}; it must be finite")
    return logprobs


def _temperature(node: Node, is_live: bool, where: str) -> float:
    """Return the temperature that scores the node's sampled tokens."""
    if np.isfinite(node.temperature) and node.temperature > 0:
        return node.temperature
    if is_live:
        raise SampleError(
            f"{where}: `temperature`={node.temperature!r} of a live policy's tokens must be finite and above 0"
        )
    # Note: a greedy frozen source has no distribution to rescale to, and the trainer divides logits by this number.
    return 1.0


def _where(rollout: Rollout, index: int) -> str:
    return f"env {rollout.env_name!r}, group {rollout.group_id!r}, member {rollout.member}, node {index}"
