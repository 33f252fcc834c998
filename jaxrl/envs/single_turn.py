"""One question, one reply, one score: an environment from two functions.

In: a list of task specs, `prompt(spec)` and `score(spec, text)`. Out: an `Environment`. Nothing here knows what a
question is about; a world with more than one turn implements `Environment.play` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence

from jaxrl.config.env import ExampleConfig
from jaxrl.envs.base import Message, Outcome, Session, TaskSpec
from jaxrl.errors import ConfigError, GraderError

Score = float | None


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
        score: Callable[[TaskSpec, str], Score | Awaitable[Score]],
        *,
        system_prompt: str | None = None,
        examples: Sequence[ExampleConfig] = (),
        require_stop: bool = False,
        demonstration: Callable[[TaskSpec], str | None] = lambda spec: None,
        score_deadline_s: float = 30.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        ids = [spec.get("id") for spec in tasks]
        if not ids:
            raise ConfigError(f"env {name!r} has no tasks")
        if None in ids or len(set(ids)) < len(ids):
            raise ConfigError(f"env {name!r}: every task needs an `id` of its own, got {len(set(ids) - {None})} ids for {len(ids)} tasks")
        self.name = name
        shown = {example.question for example in examples}
        self._tasks = [spec for spec in tasks if prompt(spec) not in shown] if shown else list(tasks)
        if not self._tasks:
            raise ConfigError(f"env {name!r}: each of its {len(ids)} tasks is one of `examples`; leave some of those out")
        self._prompt = prompt
        self._score = score
        self._opening: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        for example in examples:
            self._opening += [{"role": "user", "content": example.question}, {"role": "assistant", "content": example.answer}]
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

    def scored_by(self, score: Callable[[TaskSpec, str], Score | Awaitable[Score]], close: Callable[[], None]) -> SingleTurnEnvironment:
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
            reward = await self._scored(spec, reply.text)
        return Outcome(reward=reward, stop_reason="done" if reply.is_stopped else "max_tokens", is_truncated=not reply.is_stopped)

    async def _scored(self, spec: TaskSpec, text: str) -> Score:
        """Call the scorer where it does not hold up the event loop, and file what it raises under `grader`."""
        try:
            if inspect.iscoroutinefunction(self._score):
                return await self._score(spec, text)
            value = await _in_own_thread(self._score, spec, text, self._score_deadline_s)
            return await value if inspect.isawaitable(value) else value
        except GraderError:
            raise
        except (Exception, SystemExit) as error:
            raise _grader_error(error) from error


async def _in_own_thread(
    score: Callable[[TaskSpec, str], Score | Awaitable[Score]], spec: TaskSpec, text: str, deadline_s: float
) -> Score | Awaitable[Score]:
    """Call a plain function in a daemon thread of its own.

    In a pool, functions that never return would take every thread, and with them whatever else works there, and would
    keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Score | Awaitable[Score], BaseException | None]] = loop.create_future()

    def settle(value: Score | Awaitable[Score], error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = score(spec, text)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the run ended, and its loop with it, before the function returned
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="score", daemon=True).start()
    if not (await asyncio.wait([done], timeout=deadline_s))[0]:
        raise GraderError(f"the score was not there after {deadline_s:g} s; its thread cannot be killed and goes on")
    value, error = done.result()
    # Raised here and not through the future, which cannot hold a StopIteration.
    if error is not None:
        raise _grader_error(error) from error
    return value


def _grader_error(error: BaseException) -> GraderError:
    return GraderError(f"{type(error).__name__}: {error}")
