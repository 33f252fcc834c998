"""The record of one episode of an evaluation: a row that a repeat writes again, byte for byte, and apart from it what a clock said.

In: a planned episode, and its rollout when it is over, whatever became of it. Out: JSON objects. A reward is a number or null, never a 0
in place of an error. It plays nothing and writes no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.evals.demonstrations import DemonstrationScore
from jaxrl.evals.observation import FirstObservation, observation_sha, prompt_sha
from jaxrl.evals.plan import PlannedEpisode
from jaxrl.monitors.rollouts import conversation_record, without_times
from jaxrl.types import Boundary, Failure, Rollout

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def episode_row(
    episode: PlannedEpisode,
    rollout: Rollout,
    first: FirstObservation,
    version: int | None,
    *,
    volatile_keys: frozenset[str],
) -> dict[str, Any]:
    """Return the row of an episode that is over.

    Args:
      episode: what was planned.
      rollout: what was played.
      first: what the policy was asked first.
      version: the policy version that was held.
      volatile_keys: keys of JSON in messages that do not count in the hash of what was asked.
    """
    spec = rollout.task.spec
    failure = rollout.failure
    return {
        "episode_id": episode.episode_id,
        "index": episode.index,
        "task_id": episode.task.id,
        **{key: _plain(spec[key]) for key in ("difficulty", "group") if spec.get(key) is not None},
        "split": episode.split,
        "seed": _plain(spec.get("seed")),
        "sample": episode.sample,
        "status": "error" if failure else "unscored" if rollout.reward is None else "ok",
        "error": None if failure is None else _error(failure),
        "reward": rollout.reward,
        "turns": rollout.num_turns,
        "completion_tokens": _num_completion_tokens(rollout),
        "finish_reason": next((node.finish_reason for node in reversed(rollout.nodes) if node.sampled), None),
        "stop_reason": rollout.stop_reason,
        "is_truncated": rollout.is_truncated,
        "version": version,
        "token_versions": sorted({int(v) for node in rollout.nodes if node.versions is not None for v in node.versions}),
        "observation_sha": observation_sha(first.shown, rollout, volatile_keys),
        "prompt_sha": prompt_sha(rollout),
        "metrics": without_times({"metrics": rollout.metrics})["metrics"],
        "text": rollout.completion_text,
        **conversation_record(rollout),
    }


def timing_row(episode: PlannedEpisode, rollout: Rollout) -> dict[str, Any]:
    """Return how long an episode took, in seconds, with the times that the environment and the session report."""
    times = {name: value for name, value in rollout.metrics.items() if name.endswith("_s")}
    return {"episode_id": episode.episode_id, "duration_s": round(rollout.duration_s, 3), **({"metrics": times} if times else {})}


def demonstration_columns(score: DemonstrationScore | None) -> dict[str, Any]:
    """Return what a row says of the task's demonstration; null where there is none."""
    return {
        "demonstration_nll": None if score is None else score.nll,
        "demonstration_tokens": None if score is None else score.num_tokens,
    }


def is_policy_failure(row: Mapping[str, Any]) -> bool:
    """Say whether an episode failed because the policy did not answer. A prompt that is too long is no failure of its endpoint."""
    error = row.get("error")
    return error is not None and error["stage"] == Boundary.POLICY and error["type"] != "PromptTooLongError"


def is_worth_replaying(row: Mapping[str, Any]) -> bool:
    """Say whether a resumed evaluation plays an episode again: it failed for want of an answer, of time, or of the environment's server.

    All of these may have changed. What an environment or a grader raised is kept: it is what the episode is like.
    """
    error = row.get("error")
    return is_policy_failure(row) or (error is not None and (error["stage"] == Boundary.TIMEOUT or error["type"] == "EnvUnreachableError"))


def without_addresses(text: str) -> str:
    """Return a message without addresses in memory, which differ in every process.

    Example:
      >>> without_addresses("<Board object at 0x7f3a10c2d5b0> is full")
      '<Board object at 0x...> is full'
    """
    return _ADDRESS.sub("0x...", text)


def _error(failure: Failure) -> dict[str, Any]:
    return {"stage": str(failure.boundary), "type": failure.type, "message": without_addresses(failure.message)}


def _num_completion_tokens(rollout: Rollout) -> int | None:
    """Return how many tokens the policy wrote; None if nobody counted those of a reply that is known by its words alone."""
    is_uncounted = any(node.sampled and node.content and not node.num_sampled for node in rollout.nodes)
    return None if is_uncounted else rollout.num_completion_tokens


def _plain(value: Any) -> Any:
    """Return a number or a text of a task's spec as JSON has it, so that a row is the same when it is read again; anything else as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
