"""Rollouts as lines of JSON, for people and for tools that look at what was played and what was learned from it.

In: `Rollout`s of a step, in whatever bucket they ended. Out: one object per rollout: task, messages, reward or error,
bucket, and per branch the token ids with every stream that the trainer saw and, in a token export, what became of each
token. `docs/rollouts.md` describes the file. Writing happens in a worker thread; nothing here changes a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxrl.monitors.jsonl import plain
from jaxrl.monitors.tokens import PlayedBranch, loss_mask, origins, played_branches, resolved_weights, spread, trained_tokens, why_untrained
from jaxrl.types import OPTIONAL_STREAMS, Rollout

_DIGITS = 6
"""Decimals of a logged float: float32 logprobs have no more, and the files stay half as large."""


def rollout_record(step: int, rollout: Rollout, *, token_export: bool = True, texts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return one rollout as a JSON value.

    Args:
      step: the step that it belongs to.
      rollout: scored or failed, trained or dropped.
      token_export: say of each token what became of it, too.
      texts: the text of each token id; None leaves the texts out. Without a token export nothing reads it.

    Returns:
      An object with `step, env, task, group_id, member, draw_index, reward, error, bucket, stop_reason, is_truncated,
      text, messages, samples, metrics, info, num_turns, num_completion_tokens, duration_s`. `samples` has one entry per
      branch, whose lists are all of one length: `token_ids`, `loss_mask` (0 or 1), `versions` (null where the policy did
      not sample) and `streams`, from which absent ones are left out. A token export adds `text`, `origin`,
      `why_untrained` (null where trained), `weights` by component, from which one that is 0 everywhere is left out, and
      the stream `trainer_logprobs`.
    """
    return {
        "step": step,
        "env": rollout.env_name,
        "task": plain({"id": rollout.task.id, **rollout.task.spec}),
        "group_id": rollout.group_id,
        "member": rollout.member,
        "draw_index": rollout.draw_index,
        "reward": plain(rollout.reward),
        "error": None if rollout.failure is None else asdict(rollout.failure),
        "bucket": rollout.bucket,
        "stop_reason": rollout.stop_reason,
        "is_truncated": rollout.is_truncated,
        "text": rollout.completion_text,
        "messages": rollout.messages(),
        "samples": [_branch_record(rollout, branch, token_export, texts) for branch in played_branches(rollout)],
        "metrics": plain(rollout.metrics),
        "info": plain(rollout.info),
        "num_turns": rollout.num_turns,
        "num_completion_tokens": rollout.num_completion_tokens,
        "duration_s": round(rollout.duration_s, 3),
    }


def _branch_record(rollout: Rollout, branch: PlayedBranch, token_export: bool, texts: Mapping[int, str] | None) -> dict[str, Any]:
    token_ids = np.concatenate([node.token_ids for node in branch.nodes]).tolist()
    versions = np.concatenate([spread(node, node.versions, -1) for node in branch.nodes]).astype(np.int64)
    record: dict[str, Any] = {
        "token_ids": token_ids,
        "loss_mask": loss_mask(branch).astype(np.int8).tolist(),
        "versions": [None if version < 0 else version for version in versions.tolist()],
        "streams": _streams(branch),
    }
    if not token_export:
        return record
    if texts is not None:
        record["text"] = [texts[token_id] for token_id in token_ids]
    record["origin"] = [origin for node in branch.nodes for origin in origins(node)]
    record["why_untrained"] = why_untrained(rollout, branch)
    record["weights"] = {}
    if branch.sample is not None:
        weights = resolved_weights(branch.sample)
        record["weights"] = {name: _rounded(values) for name, values in weights.items() if values.any()}
        if branch.packed is not None and branch.packed.trainer_logprobs is not None:
            logprobs = np.full(len(token_ids), np.nan, np.float32)
            logprobs[: branch.packed.num_tokens] = branch.packed.trainer_logprobs
            record["streams"]["trainer_logprobs"] = _rounded(np.where(trained_tokens(branch.sample), logprobs, np.nan))
    return record


def _streams(branch: PlayedBranch) -> dict[str, list[float | None]]:
    """Return the streams that the trainer saw, or would have seen; sampling logprobs of a live policy where it sampled."""
    streams = {"inference_logprobs": _rounded(np.concatenate([spread(node, node.logprobs, np.nan) for node in branch.nodes]))}
    sample = branch.sample
    if sample is None:
        return streams
    streams |= {name: _rounded(stream) for name in OPTIONAL_STREAMS if (stream := getattr(sample, name)) is not None}
    if np.any(sample.temperatures != 1.0):
        streams["temperatures"] = _rounded(sample.temperatures)
    return streams


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return numbers with few decimals, whole ones as integers where all are, and null for what is no number."""
    numbers = values.astype(np.float64).round(_DIGITS)
    is_finite = np.isfinite(numbers)
    if is_finite.all():
        is_whole = (np.abs(numbers) < 1e6) & (numbers == np.rint(numbers))
        return (numbers.astype(np.int64) if is_whole.all() else numbers).tolist()
    objects = numbers.astype(object)
    objects[~is_finite] = None
    return objects.tolist()
