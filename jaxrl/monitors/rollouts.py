"""Rollouts as lines of JSON, for people and for tools that look at what was played and what was learned from it.

In: `Rollout`s of a step, in whatever bucket they ended. Out: one object per rollout: task, messages, reward or error,
bucket, and per branch the token ids with every stream that the trainer saw. Writing happens in a worker thread; nothing
here changes a rollout.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from jaxrl.types import OPTIONAL_STREAMS, Node, Rollout

_DIGITS = 6
"""Decimals of a logged float: float32 logprobs have no more, and the files stay half as large."""


def rollout_record(step: int, rollout: Rollout) -> dict[str, Any]:
    """Return one rollout as a JSON value.

    Args:
      step: the step that it belongs to.
      rollout: scored or failed, trained or dropped.

    Returns:
      An object with `step, env, task, group_id, member, draw_index, reward, error, bucket, stop_reason, is_truncated,
      text, messages, samples, metrics, info, num_turns, num_completion_tokens, duration_s`. `samples` has one entry per
      branch: `token_ids`, `loss_mask` (0 or 1), `versions` (null where the policy did not sample) and `streams`, all of
      one length; absent streams are left out.
    """
    return {
        "step": step,
        "env": rollout.env_name,
        "task": {"id": rollout.task.id, **rollout.task.spec},
        "group_id": rollout.group_id,
        "member": rollout.member,
        "draw_index": rollout.draw_index,
        "reward": rollout.reward,
        "error": None if rollout.failure is None else asdict(rollout.failure),
        "bucket": rollout.bucket,
        "stop_reason": rollout.stop_reason,
        "is_truncated": rollout.is_truncated,
        "text": rollout.completion_text,
        "messages": rollout.messages(),
        "samples": [_branch_record(rollout, leaf) for leaf in rollout.leaves],
        "metrics": dict(rollout.metrics),
        "info": rollout.info,
        "num_turns": rollout.num_turns,
        "num_completion_tokens": rollout.num_completion_tokens,
        "duration_s": round(rollout.duration_s, 3),
    }


def _branch_record(rollout: Rollout, leaf: int) -> dict[str, Any]:
    """Return one branch: the trained sample where there is one with these ids, else what the nodes say."""
    path = [rollout.nodes[index] for index in rollout.path_to(leaf)]
    token_ids = np.concatenate([node.token_ids for node in path])
    sample = next((s for s in rollout.samples if np.array_equal(s.token_ids, token_ids)), None)
    streams: dict[str, list[float | None]] = {}
    if sample is None:
        loss_mask = np.concatenate([_sampled(node) if node.loss_mask is None else node.loss_mask for node in path])
        inference_logprobs = np.concatenate([_spread(node, node.logprobs, 0.0) for node in path])
    else:
        loss_mask, inference_logprobs = sample.loss_mask, sample.inference_logprobs
        streams = {name: _rounded(getattr(sample, name)) for name in OPTIONAL_STREAMS if getattr(sample, name) is not None}
        if np.any(sample.temperatures != 1.0):
            streams["temperatures"] = _rounded(sample.temperatures)
    versions = np.concatenate([_spread(node, node.versions, -1) for node in path])
    return {
        "token_ids": token_ids.tolist(),
        "loss_mask": loss_mask.astype(int).tolist(),
        "versions": [None if version < 0 else int(version) for version in versions],
        "streams": {"inference_logprobs": _rounded(inference_logprobs), **streams},
    }


def _sampled(node: Node) -> np.ndarray:
    """Return [n] bool, True on the tail that the policy sampled."""
    return np.arange(len(node.token_ids)) >= len(node.token_ids) - node.num_sampled


def _spread(node: Node, tail: np.ndarray | None, fill: float) -> np.ndarray:
    """Return [n] values: `fill`, then the values of the sampled tail."""
    full = np.full(len(node.token_ids), fill, dtype=np.float64)
    if tail is not None and len(tail):
        full[-len(tail) :] = tail
    return full


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(value, _DIGITS) if np.isfinite(value) else None for value in values.tolist()]
