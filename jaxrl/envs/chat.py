"""A conversation of several turns: a base for environments that is four short hooks, and the budgets that end it.

In: tasks, the hooks, a budget. Out: an `Environment`. Tokens are the session's business; a subclass sees messages and replies.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Message, Outcome, Reply, Session, TaskSpec, ToolSchema
from jaxrl.errors import EnvError, GraderError, PromptTooLongError


@dataclass(slots=True)
class Episode:
    """One rollout, as the hooks of a `ChatEnvironment` see it."""

    spec: TaskSpec
    """The task."""
    session: Session
    """The conversation; a hook may `fork` or `restart` it for a sub-agent."""
    replies: list[Reply] = field(default_factory=list)
    """What the policy said so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """Whatever the environment keeps for this rollout."""
    turn_rewards: list[float] = field(default_factory=list)
    """A reward per reply, if the environment gives any; then there is one for each."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite numbers to keep with the rollout."""
    info: dict[str, Any] = field(default_factory=dict)
    """What else algorithms and logs are told; JSON-like."""
    is_truncated: bool = False
    """True once a limit has ended it."""

    @property
    def last(self) -> Reply:
        """The policy's last reply."""
        return self.replies[-1]


class ChatEnvironment:
    """Base of an environment with several turns. A subclass overrides hooks; each may be a coroutine function.

    Args:
      name: name in metrics and logs.
      tasks: the task specs; not empty, each with an `id` of its own.
      budget: when a conversation ends though `done` says nothing.
    """

    tools: Sequence[ToolSchema] = ()
    """What the policy may call in every conversation."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        *,
        budget: BudgetConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._tasks = list(tasks)
        self._budget = budget or BudgetConfig()
        self._clock = clock

    def reset(self, episode: Episode) -> Sequence[Message]:
        """Return the opening messages of a rollout."""
        raise NotImplementedError

    def reply(self, episode: Episode) -> Sequence[Message]:
        """Return the world's answer to `episode.last`; not empty."""
        raise NotImplementedError

    def done(self, episode: Episode) -> bool | str:
        """Say whether the conversation is over after `episode.last`; a text is the stop reason."""
        return False

    def score(self, episode: Episode) -> float | None:
        """Return the reward of a conversation that has ended, however it did; None if it cannot be scored."""
        raise NotImplementedError

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs in their order."""
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> str | Sequence[str] | None:
        """Return the policy's reference replies, one per turn (a single text is one turn); None if there are none."""
        return None

    def close(self) -> None:
        """Give back what playing took."""

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Play one task to its end."""
        episode = Episode(spec, session)
        stop_reason = await self._converse(episode)
        try:
            reward = await _called(self.score, episode)
        except Exception as error:
            raise GraderError(f"{type(error).__name__}: {error}") from error
        return Outcome(
            reward=reward,
            stop_reason=stop_reason,
            is_truncated=episode.is_truncated,
            metrics=episode.metrics,
            info=episode.info,
            turn_rewards=episode.turn_rewards or None,
        )

    async def _converse(self, episode: Episode) -> str:
        """Play turns until the environment or a limit ends it; return the stop reason."""
        started_s = self._clock()
        messages = await _called(self.reset, episode)
        while True:
            try:
                reply = await episode.session.ask(messages, tools=self.tools)
            except PromptTooLongError:
                if not episode.replies:
                    raise
                episode.is_truncated = True
                return "window_full"
            episode.replies.append(reply)
            if over := await _called(self.done, episode):
                return over if isinstance(over, str) else "done"
            if limit := self._limit(episode, self._clock() - started_s):
                episode.is_truncated = True
                return limit
            messages = await _called(self.reply, episode)
            if not messages:
                raise EnvError(f"env {self.name!r}: `reply` returned no message; end a conversation in `done`")

    def _limit(self, episode: Episode, duration_s: float) -> str | None:
        """Return the limit that is reached, if one is."""
        budget = self._budget
        if not episode.last.is_stopped:
            return "max_tokens"
        if len(episode.replies) >= budget.max_turns:
            return "max_turns"
        if budget.max_completion_tokens and sum(reply.num_tokens for reply in episode.replies) >= budget.max_completion_tokens:
            return "max_completion_tokens"
        if budget.max_duration_s and duration_s >= budget.max_duration_s:
            return "max_duration"
        return None


async def _called(hook: Callable[..., Any], episode: Episode) -> Any:
    value = hook(episode)
    return await value if inspect.isawaitable(value) else value
