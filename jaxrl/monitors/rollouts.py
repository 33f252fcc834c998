"""Rollouts as lines of JSON, for people and for tools that look at what was played and what was learned from it.

In: `Rollout`s of a step, in whatever bucket they ended. Out: one object per rollout: task, messages, the graph of its
nodes, reward or error, bucket, and per branch the token ids with every stream that the trainer saw and, in a token
export, what became of each token. `docs/rollouts.md` describes the file. Writing happens in a worker thread; nothing
here changes a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxrl.monitors.tokens import PlayedBranch, loss_mask, origins, played_branches, resolved_weights, trained_tokens, why_untrained
from jaxrl.types import OPTIONAL_STREAMS, Node, Rollout, ToolCall

_DIGITS = 6
"""Decimals of a logged float: float32 logprobs have no more, and the files stay half as large."""


def rollout_record(step: int, rollout: Rollout, *, token_export: bool = True, texts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return one rollout as a value that JSON can hold, but for what its task, `info` and `metrics` hold, which are as they are.

    Args:
      step: the step that it belongs to.
      rollout: scored or failed, trained or dropped.
      token_export: say of each token what became of it, too.
      texts: the text of each token id; None leaves the texts out. Without a token export nothing reads it.

    Returns:
      An object with `step, env, task, group_id, member, draw_index, reward, turn_rewards, error, bucket, stop_reason,
      is_truncated, text, messages, nodes, samples, metrics, info, num_turns, num_completion_tokens, duration_s`. `nodes`
      is the graph that `monitors.conversation` draws. `samples` has one entry per branch: `nodes`, the indices of those
      that it is made of, and lists that are all of one length: `token_ids`, `loss_mask` (0 or 1), `versions` (null where
      the policy did not sample) and those of `streams`, from which absent ones are left out. A token export adds `text`,
      `origin`, `why_untrained` (null where trained), `weights` by component, from which one that is 0 everywhere is left
      out, and the stream `trainer_logprobs`.
    """
    return {
        "step": step,
        "env": rollout.env_name,
        "task": {"id": rollout.task.id, **rollout.task.spec},
        "group_id": rollout.group_id,
        "member": rollout.member,
        "draw_index": rollout.draw_index,
        "reward": None if rollout.reward is None else float(rollout.reward),
        "turn_rewards": rollout.turn_rewards,
        "error": None if rollout.failure is None else asdict(rollout.failure),
        "bucket": rollout.bucket,
        "stop_reason": rollout.stop_reason,
        "is_truncated": rollout.is_truncated,
        "text": rollout.completion_text,
        **conversation_record(rollout),
        "samples": [_branch_record(rollout, branch, token_export, texts) for branch in played_branches(rollout)],
        "metrics": dict(rollout.metrics),
        "info": rollout.info,
        "num_turns": rollout.num_turns,
        "num_completion_tokens": rollout.num_completion_tokens,
        "duration_s": round(rollout.duration_s, 3),
    }


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a rollout without what a clock said: what a run that is repeated exactly writes again.

    By the naming of metrics, a time is a number whose name ends in `_s`.

    Example:
      >>> without_times({"reward": 1.0, "metrics": {"tools/calls": 2.0, "tools/duration_s": 0.25}, "duration_s": 1.5})
      {'reward': 1.0, 'metrics': {'tools/calls': 2.0}}
    """
    kept = {key: value for key, value in record.items() if key != "duration_s"}
    return kept | {"metrics": {name: value for name, value in record["metrics"].items() if not name.endswith("_s")}}


def conversation_record(rollout: Rollout) -> dict[str, Any]:
    """Return what was said: `messages`, the last branch as a chat, and `nodes`, all branches as a graph."""
    last_branch = rollout.path_to(len(rollout.nodes) - 1) if rollout.nodes else ()
    return {
        "messages": [_message_record(rollout.nodes[index]) for index in last_branch],
        "nodes": [_node_record(node) for node in rollout.nodes],
    }


def _message_record(node: Node) -> dict[str, Any]:
    """Return a node as a chat message; what it does not have is left out."""
    record: dict[str, Any] = {"role": node.role, "content": node.content}
    if node.name is not None:
        record["name"] = node.name
    if node.tool_calls:
        record["tool_calls"] = [_call_record(call) for call in node.tool_calls]
    return record


def _call_record(call: ToolCall) -> dict[str, Any]:
    """Return a call; a malformed one has what was written in place of arguments, and why it is none."""
    if call.arguments is not None:
        return {"id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": call.id, "name": call.name, "arguments": None, "raw": call.raw, "error": call.error}


def _node_record(node: Node) -> dict[str, Any]:
    record = {"parent": node.parent, **_message_record(node)}
    if len(node.token_ids):  # none are known of a model that is known by words alone
        record["num_tokens"] = len(node.token_ids)
    if node.is_content is not None and not node.sampled:
        record["num_content_tokens"] = int(node.is_content.sum())
    if node.sampled:
        record |= {"sampled": True, "num_sampled": node.num_sampled, "finish_reason": node.finish_reason}
    if node.is_retold:
        record["retold"] = True
    if node.sampled and node.source != "policy":
        record["source"] = node.source
    return record


def _branch_record(rollout: Rollout, branch: PlayedBranch, token_export: bool, texts: Mapping[int, str] | None) -> dict[str, Any]:
    token_ids = np.concatenate([node.token_ids for node in branch.nodes]).tolist()
    record: dict[str, Any] = {
        "nodes": list(branch.path),
        "token_ids": token_ids,
        "loss_mask": loss_mask(branch).astype(np.int8).tolist(),
        "versions": [value for node in branch.nodes for value in _spread(node, None if node.versions is None else node.versions.tolist())],
        "streams": _streams(branch),
    }
    if not token_export:
        return record
    if texts is not None:
        record["text"] = [texts[token_id] for token_id in token_ids]
    record["origin"] = [origin for node in branch.nodes for origin in origins(node)]
    record["why_untrained"] = why_untrained(rollout, branch)
    record["weights"] = {}
    # Before an algorithm is done with a rollout, the absent streams of its samples say nothing of the loss.
    if rollout.is_frozen and branch.sample is not None and branch.members is not None:
        weights = resolved_weights(branch.sample, branch.members)
        record["weights"] = {name: _rounded(values, is_weight=True) for name, values in weights.items()}
        if branch.packed is not None and branch.packed.trainer_logprobs is not None:
            logprobs = np.full(len(token_ids), np.nan, np.float32)
            logprobs[: branch.packed.num_tokens] = branch.packed.trainer_logprobs
            logprobs[~trained_tokens(branch.members)] = np.nan
            record["streams"]["trainer_logprobs"] = _rounded(logprobs)
    return record


def _streams(branch: PlayedBranch) -> dict[str, list[Any]]:
    """Return the streams that the trainer saw, or would have seen; sampling logprobs where a live policy sampled."""
    logprobs = [None if node.logprobs is None else _rounded(node.logprobs) for node in branch.nodes]
    streams: dict[str, list[Any]] = {
        "inference_logprobs": [value for node, tail in zip(branch.nodes, logprobs, strict=True) for value in _spread(node, tail)]
    }
    sample = branch.sample
    if sample is None:
        return streams
    for name in OPTIONAL_STREAMS:
        if (stream := getattr(sample, name)) is not None:
            streams[name] = _rounded(stream, is_weight=name != "ref_logprobs")
    if (sample.temperatures != 1.0).any():
        streams["temperatures"] = _rounded(sample.temperatures)
    return streams


def _spread(node: Node, tail: list[Any] | None) -> list[Any]:
    """Return a value per token of a node: None, then the values of the sampled tail; None everywhere if there are none."""
    return [None] * (len(node.token_ids) - len(tail or ())) + (tail or [])


def _rounded(values: np.ndarray, *, is_weight: bool = False) -> list[float | None]:
    """Return numbers with few decimals, whole ones as integers where all are, and null for what is no number.

    Of what the loss multiplies by, only 0 becomes 0.
    """
    if values.dtype == np.int8:
        return values.tolist()
    numbers = values.astype(np.float64).round(_DIGITS)
    if is_weight and (is_lost := (numbers == 0) & (values != 0)).any():
        numbers[is_lost] = [float(f"{value:.{_DIGITS}g}") for value in values[is_lost].tolist()]
    is_finite = np.isfinite(numbers)
    if is_finite.all():
        is_whole = (np.abs(numbers) < 1e6) & (numbers == np.rint(numbers))
        return (numbers.astype(np.int64) if is_whole.all() else numbers).tolist()
    objects = numbers.astype(object)
    objects[~is_finite] = None
    return objects.tolist()
