"""One question, one reply, one score: an environment from two functions.

In: a list of task specs, `prompt(spec)` and `score(spec, text)`. Out: an `Environment`. Nothing here knows what a
question is about; a world with more than one turn implements `Environment.play` itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from jaxrl.config.env import ExampleConfig
from jaxrl.envs.base import Outcome, Score, Session, TaskSpec, checked_tasks, opening
from jaxrl.envs.hooks import scored
from jaxrl.errors import ConfigError


class SingleTurnEnvironment:
    """Ask one question and score the reply.

    Args:
      name: name in metrics and logs.
      tasks: the task specs; not empty, each with an `id` of its own.
      prompt: spec -> the user's message.
      score: spec, text of the reply -> a finite number, or None if it cannot be scored. May be a coroutine function; a
        plain function runs in a thread of its own, several at a time, so it must not share mutable state. A thread
        cannot be killed: what may hang belongs into worker processes (`envs.grading`).
      system_prompt: a system message before the question; None sends none.
      examples: questions with answers, shown as turns before the question; a task with the same question is left out, since
        its answer would be in its prompt.
      require_stop: a reply that the token limit cut is worth 0.0 without asking `score`.
      demonstration: spec -> the reference reply, as the policy should write it; None if there is none.
      score_deadline_s: a plain function that runs longer gives no reward, though its thread goes on.
      close: gives back what `score` holds.

    Raises:
      ConfigError: no task, or two tasks with one id, or a task without one, or every task is an example.

    Example:
      >>> env = SingleTurnEnvironment(
      ...     "shout",
      ...     [{"id": "hi", "text": "hi"}],
      ...     prompt=lambda spec: f"Shout: {spec['text']}",
      ...     score=lambda spec, text: float(text == spec["text"].upper()),
      ... )
      >>> env.tasks()
      [{'id': 'hi', 'text': 'hi'}]
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        prompt: Callable[[TaskSpec], str],
        score: Score,
        *,
        system_prompt: str | None = None,
        examples: Sequence[ExampleConfig] = (),
        require_stop: bool = False,
        demonstration: Callable[[TaskSpec], str | None] = lambda spec: None,
        score_deadline_s: float = 30.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._tasks = checked_tasks(name, tasks)
        if shown := {example.question for example in examples}:
            self._tasks = [spec for spec in self._tasks if prompt(spec) not in shown]
        if not self._tasks:
            raise ConfigError(f"env {name!r}: each of its {len(tasks)} tasks is one of `examples`; leave some of those out")
        self._prompt = prompt
        self._score = score
        self._opening = opening(system_prompt, examples)
        self._require_stop = require_stop
        self._demonstration = demonstration
        self._score_deadline_s = score_deadline_s
        self._close = close

    def tasks(self) -> Sequence[TaskSpec]:
        """Return the task specs in their order."""
        return self._tasks

    def demonstration(self, spec: TaskSpec) -> str | None:
        """Return the reference reply to a task."""
        return self._demonstration(spec)

    def scored_by(self, score: Score, close: Callable[[], None]) -> SingleTurnEnvironment:
        """Return this environment with another scorer, and what gives back what that one holds."""
        self._close()
        other = copy.copy(self)
        other._score, other._close = score, close
        return other

    def close(self) -> None:
        """Give back what the scorer holds."""
        self._close()

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """Ask, score, done."""
        reply = await session.ask([*self._opening, {"role": "user", "content": self._prompt(spec)}])
        if self._require_stop and not reply.is_stopped:
            reward = 0.0
        else:
            reward = await scored(self._score, spec, reply.text, deadline_s=self._score_deadline_s)
        return Outcome(reward=reward, stop_reason="done" if reply.is_stopped else "max_tokens", is_truncated=not reply.is_stopped)
