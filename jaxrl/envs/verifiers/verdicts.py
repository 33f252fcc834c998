"""What an episode of verifiers came to: its errors, rewards and replies, and the outcome of the rollout that it was.

In: an `Episode` as the package returns it, and what the policy said in it. Out: an `Outcome`, or the exception that the rollout fails with.
An episode that failed, or that was not scored, has the reward 0 in verifiers; here it has none. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.envs.base import Outcome
from jaxrl.envs.gateway.talk import Talk
from jaxrl.errors import EnvError, GraderError

MAX_ERROR_CHARS = 2000
"""How much of an error is repeated: a program's may be all that it wrote."""

STOP_WORDS = {
    None: "done",
    "agent_completed": "done",
    "max_output_tokens": "max_completion_tokens",
    "agent_timeout": "max_duration",
}
"""What jaxrl calls some of verifiers' stop conditions; the others, such as a task's own, keep their names."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an episode came to."""

    error: str | None = None
    """Why it failed, in words; None if it did not."""
    is_grading: bool = False
    """True if what failed was a reward or a metric."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Each reward with its weight in it; None for one that was not given."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Each metric; None for one that was not taken."""
    stop_condition: str | None = None
    """What stopped it, as verifiers says."""
    is_truncated: bool = False
    """True if a limit did."""
    num_replies: int = 0
    """Messages that verifiers took for the policy's."""
    replies: Sequence[str] | None = None
    """What they say; None if the taskset rewrote some."""

    @property
    def reward(self) -> float | None:
        """The sum of the rewards; None if there is none, or one of them is missing."""
        values = list(self.rewards.values())
        given = [value for value in values if value is not None]
        return sum(given) if given and len(given) == len(values) else None


def read_episode(episode: Any) -> Verdict:
    """Return what an `Episode` of verifiers came to."""
    failures = list(episode.errors)
    if len(episode.traces) != 1:
        if not episode.traces and failures:
            return Verdict(error=_told(failures[-1]))
        names = ", ".join(sorted({trace.agent.name for trace in episode.traces})) or "none"
        return Verdict(
            error=f"the episode has {len(episode.traces)} traces, of these agents: {names}; a rollout is one run of one agent, and an "
            "environment of several cannot be trained on here"
        )
    (trace,) = episode.traces
    if not trace.agent.trainable:
        return Verdict(error=f"the taskset says that its agent {trace.agent.name!r} is not to be trained")
    error, is_grading = None, False
    if not trace.ok or not episode.ok:
        failures = list(trace.errors) if not trace.ok else failures
        error = _told(failures[-1]) if failures else "it says of itself that it failed, and not why"
        is_grading = not trace.ok and bool(trace.timing.scoring.start)
    said = [message.content or "" for message in trace.assistant_messages]
    return Verdict(
        error=error,
        is_grading=is_grading,
        rewards={name: None if reward is None else float(reward.value) for name, reward in trace.rewards.items()},
        metrics=dict(trace.metrics),
        stop_condition=trace.stop_condition,
        is_truncated=bool(trace.is_truncated or trace.is_timeout),
        num_replies=trace.num_turns,
        replies=None if trace.response_rewrites else said,
    )


def outcome_of(verdict: Verdict, talk: Talk, where: str) -> Outcome:
    """Return the outcome of a rollout.

    Args:
      verdict: what the episode came to.
      talk: what the policy was asked in it; its own failures were raised before.
      where: the environment, for messages.

    Raises:
      PromptTooLongError: it failed because its conversation left no room for a reply.
      GraderError: its rewards or metrics failed.
      EnvError: it failed otherwise, the policy was never asked, or verifiers has a reply that the policy did not give.
    """
    if verdict.error is not None:
        if talk.too_long is not None:
            raise talk.too_long
        if talk.limit is not None:
            return Outcome(None, stop_reason=talk.limit, is_truncated=True)
        raise (GraderError if verdict.is_grading else EnvError)(f"{where}: {verdict.error}")
    if not talk.told:
        raise EnvError(
            f"{where}: the episode ended ({verdict.stop_condition}) without one reply of the policy, so there is nothing to learn from; "
            "the harness must ask at the endpoint that it is given, and speak OpenAI's chat completions"
        )
    _require_own_replies(verdict, talk, where)
    return Outcome(
        verdict.reward,
        stop_reason=_stop_reason(verdict, talk),
        is_truncated=verdict.is_truncated or talk.limit is not None or talk.too_long is not None,
        metrics=_metrics(verdict),
    )


def _require_own_replies(verdict: Verdict, talk: Talk, where: str) -> None:
    """Raise unless everything that verifiers scored as the policy's is what was recorded of the policy."""
    told = Counter(message.get("content") or "" for message in talk.told)
    foreign = [] if verdict.replies is None else list(Counter(verdict.replies) - told)
    if foreign or verdict.num_replies > len(talk.told):
        shown = f", such as {foreign[0]!r:.200}" if foreign else ""
        raise EnvError(
            f"{where}: verifiers has {verdict.num_replies} replies of the policy{shown}, and the policy gave {len(talk.told)}, not all of "
            "them the same; the taskset must not answer in its place, and its agent must not have a `client` of its own"
        )


def _stop_reason(verdict: Verdict, talk: Talk) -> str:
    if talk.limit is not None:
        return talk.limit
    if talk.too_long is not None:
        return "window_full"
    word = STOP_WORDS.get(verdict.stop_condition, verdict.stop_condition)
    return "max_tokens" if word == "done" and verdict.is_truncated else str(word)


def _metrics(verdict: Verdict) -> dict[str, float]:
    """Return the metrics that are numbers and, if there are several rewards, each of them."""
    rewards = {f"reward/{name}": value for name, value in verdict.rewards.items()} if len(verdict.rewards) > 1 else {}
    values = {**verdict.metrics, **rewards}
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _told(error: Any) -> str:
    return f"{error.type}: {error.message}"[:MAX_ERROR_CHARS]
