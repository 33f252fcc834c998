"""A conversation of several turns: a base for environments that is four short hooks, and the budgets that end it.

In: tasks, the hooks, a budget. Out: an `Environment`. Tokens are the session's business; a subclass sees messages and replies.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Demonstration, Message, Outcome, Reply, Session, TaskSpec, ToolSchema, checked_tasks
from jaxrl.envs.hooks import called
from jaxrl.errors import EnvError, GraderError, PromptTooLongError

Said = str | Sequence[Message]
"""What the world says: messages, or a text, which is one message of the user."""
ROLES = ("system", "user", "assistant", "tool")
"""Who may have said a message: a template takes any other word too, and the policy would read what nobody meant."""


@dataclass(slots=True)
class Episode:
    """One rollout, as the hooks of a `ChatEnvironment` see it."""

    spec: TaskSpec
    """The task."""
    session: Session
    """The conversation; a hook may `fork` or `restart` it for a sub-agent, or put the new one in its place."""
    replies: list[Reply] = field(default_factory=list)
    """What the policy said so far, without what a hook asked itself."""
    state: dict[str, Any] = field(default_factory=dict)
    """Whatever the environment keeps for this rollout."""
    turn_rewards: list[float] = field(default_factory=list)
    """A reward per reply, if the environment gives any; then one for each that was given, those to a fork's or a restart's questions too,
    in that order."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite numbers to keep with the rollout."""
    info: dict[str, Any] = field(default_factory=dict)
    """What else algorithms and logs are told; JSON-like."""
    is_truncated: bool = False
    """True once a limit has ended it; `score` may look."""

    @property
    def last(self) -> Reply:
        """The policy's last reply."""
        return self.replies[-1]


class ChatEnvironment:
    """Base of an environment with several turns. A subclass overrides hooks.

    A hook may be a coroutine function, which must not keep the event loop. A plain function runs in a thread: the hooks of one rollout
    one after the other, those of several rollouts side by side, so what they share must stand that.

    Args:
      name: name in metrics and logs.
      tasks: the task specs; not empty, each with an `id` of its own.
      budget: when a conversation ends though `done` says nothing.
      hook_deadline_s: a plain hook that runs longer fails the rollout, though its thread goes on.
      clock: monotonic time in seconds.

    Raises:
      ConfigError: no task, or two tasks with one id, or a task without one.
    """

    tools: Sequence[ToolSchema] = ()
    """What the policy may call in every conversation."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        *,
        budget: BudgetConfig | None = None,
        hook_deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._tasks = checked_tasks(name, tasks)
        self._budget = budget or BudgetConfig()
        self._hook_deadline_s = hook_deadline_s
        self._clock = clock

    def reset(self, episode: Episode) -> Said | Awaitable[Said]:
        """Return what a rollout begins with."""
        raise NotImplementedError

    def reply(self, episode: Episode) -> Said | Awaitable[Said]:
        """Return the world's answer to `episode.last`; not empty."""
        raise NotImplementedError

    def done(self, episode: Episode) -> bool | str | Awaitable[bool | str]:
        """Say whether the conversation is over after `episode.last`; a text is the stop reason."""
        return False

    def score(self, episode: Episode) -> float | Awaitable[float | None] | None:
        """Return the reward of a conversation that has ended, however it did; None if it cannot be scored.

        By default the sum of `episode.turn_rewards`.
        """
        if not episode.turn_rewards:
            raise NotImplementedError(f"env {self.name!r}: override `score`, or give `episode.turn_rewards` a reward for every reply")
        return sum(episode.turn_rewards)

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs in their order."""
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return the policy's reference replies; None if there are none."""
        return None

    def close(self) -> None:
        """Give back what playing took."""

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Play one task to its end."""
        episode = Episode(spec, session)
        stop_reason = await self._converse(episode)
        reward = await self._call(self.score, episode, failing=GraderError)
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
        said, hook = await self._call(self.reset, episode), "reset"
        while True:
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            self._check_roles(messages, hook)
            try:
                reply = await episode.session.ask(messages, tools=self.tools)
            except PromptTooLongError:
                if not episode.replies:
                    raise
                episode.is_truncated = True
                return "window_full"
            episode.replies.append(reply)
            if over := await self._call(self.done, episode):
                return over if isinstance(over, str) else "done"
            if limit := self._limit(episode, self._clock() - started_s):
                episode.is_truncated = True
                return limit
            said, hook = await self._call(self.reply, episode), "reply"
            if not said:
                raise EnvError(f"env {self.name!r}: `reply` returned no message; end a conversation in `done`")

    def _check_roles(self, messages: Any, hook: str) -> None:
        """Refuse a role that there is not; any other mistake is found where messages are rendered."""
        for index, message in enumerate(messages if isinstance(messages, Sequence) else ()):
            role = message.get("role") if isinstance(message, Mapping) else None
            if isinstance(role, str) and role not in ROLES:
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                where = f"env {self.name!r}: message {index} of `{hook}`"
                raise EnvError(f"{where}: `role` must be one of {', '.join(ROLES)}, got {role!r:.100}{hint}")

    def _limit(self, episode: Episode, duration_s: float) -> str | None:
        """Return the limit that is reached, if one is."""
        if not episode.last.is_stopped:
            return "max_tokens"
        num_tokens = sum(reply.num_tokens for reply in episode.replies)
        return self._budget.reached(num_turns=len(episode.replies), num_tokens=num_tokens, duration_s=duration_s)

    async def _call(self, hook: Callable[[Episode], Any], episode: Episode, failing: type[GraderError] | None = None) -> Any:
        what = f"env {self.name!r}: what `{getattr(hook, '__name__', hook)}` returns"
        return await called(hook, episode, what=what, deadline_s=self._hook_deadline_s, failing=failing)
