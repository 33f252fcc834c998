"""Plays one rollout, and turns whatever is raised meanwhile into data.

In: an environment, a rollout with its session, a deadline. Out: the rollout with a reward, or with a `Failure` that
says at which boundary it broke (policy, env, grader, timeout). Only cancellation from outside passes through. An error
is never a reward of 0, and nothing here retries.
"""

from __future__ import annotations

import asyncio
import copy
import time

from jaxrl.envs.base import Environment, Outcome, Session
from jaxrl.envs.deadline import rollout_deadline
from jaxrl.envs.grading.worker import finite
from jaxrl.errors import DeadlineError, EngineError, EnvError, GraderError, PromptTooLongError
from jaxrl.types import Boundary, Rollout


async def play_rollout(env: Environment, rollout: Rollout, session: Session, deadline_s: float) -> None:
    """Play a rollout to its end and write the outcome on it: rewards or failure, stop reason, metrics, info, duration.

    The environment's own clean-up (its `finally` blocks) has run when this returns, whatever happened.

    Args:
      env: the world; gets a task spec of its own, so that nothing of one rollout gets into the next.
      rollout: gets the outcome; its nodes come from the session.
      session: the rollout's conversation with the policy.
      deadline_s: a rollout that still runs after this many seconds is cancelled and fails at `timeout`.

    Raises:
      asyncio.CancelledError: the caller was cancelled; nothing else is ever raised.
    """
    started = time.monotonic()
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            with rollout_deadline(deadline):
                # A copy: other rollouts of the task, its sampler and the logs go on with the spec as it was drawn.
                outcome = await env.play(copy.deepcopy(rollout.task.spec), session)
        if deadline.expired():  # the environment swallowed the cancellation
            raise TimeoutError
        _write(outcome, rollout)
    except asyncio.CancelledError:
        if is_cancelled_by_owner():
            raise
        _fail(rollout, Boundary.ENV, EnvError("a coroutine that the environment awaited was cancelled"))
    except (Exception, SystemExit) as error:  # an environment that runs a policy's text may meet an `exit()` in it
        if deadline.expired():
            late = DeadlineError(f"rollout of env {rollout.env_name!r}, task {rollout.task.id!r} took more than {deadline_s:g} s")
            _fail(rollout, Boundary.TIMEOUT, late)
        else:
            _fail(rollout, *_boundary_of(error))
    finally:
        rollout.duration_s = time.monotonic() - started


def is_cancelled_by_owner() -> bool:
    """Say whether the current task was asked to end, as opposed to awaiting something that somebody else cancelled.

    Without the difference, a request that its endpoint cancelled would end a rollout silently, and its group never.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _boundary_of(error: BaseException) -> tuple[Boundary, BaseException]:
    """Say where an exception belongs, and which exception to show."""
    if isinstance(error, GraderError):
        return Boundary.GRADER, error.__cause__ or error
    if isinstance(error, EngineError | DeadlineError):
        return Boundary.POLICY, error
    return Boundary.ENV, error


def _fail(rollout: Rollout, boundary: Boundary, error: BaseException) -> None:
    rollout.fail(boundary, error)
    rollout.stop_reason = "prompt_too_long" if isinstance(error, PromptTooLongError) else str(boundary)
    rollout.is_truncated = isinstance(error, PromptTooLongError)


def _write(outcome: Outcome, rollout: Rollout) -> None:
    if not isinstance(outcome, Outcome):
        raise EnvError(f"env {rollout.env_name!r}: `play` must return an `Outcome`, got {type(outcome).__name__}")
    metrics: dict[str, float] = {}
    for name, value in outcome.metrics.items():
        number = finite(value)
        if number is None:
            raise EnvError(f"env {rollout.env_name!r}: metric {name!r} must be a finite number, got {value!r}")
        metrics[name] = number
    turn_rewards = _turn_rewards(outcome, rollout)
    reward = None if outcome.reward is None else finite(outcome.reward)
    if outcome.reward is not None and reward is None:
        raise GraderError(
            f"env {rollout.env_name!r}: a reward must be a finite number or None, got {outcome.reward!r} "
            f"of type {type(outcome.reward).__name__}"
        )
    rollout.reward = reward
    rollout.turn_rewards = turn_rewards
    rollout.stop_reason = outcome.stop_reason
    rollout.is_truncated = rollout.is_truncated or outcome.is_truncated  # the session notes a reply that was cut
    rollout.metrics.update(metrics)
    rollout.info.update(outcome.info)


def _turn_rewards(outcome: Outcome, rollout: Rollout) -> list[float] | None:
    """Return the rewards of single turns as numbers, one for each reply."""
    if outcome.turn_rewards is None:
        return None
    rewards = [finite(reward) for reward in outcome.turn_rewards]
    if None in rewards:
        place = rewards.index(None)
        raise GraderError(
            f"env {rollout.env_name!r}: the reward of turn {place} must be a finite number, got {outcome.turn_rewards[place]!r} "
            f"of type {type(outcome.turn_rewards[place]).__name__}"
        )
    if len(rewards) != rollout.num_turns:
        raise GraderError(
            f"env {rollout.env_name!r}: `turn_rewards` needs one reward for each of the {rollout.num_turns} replies of the policy (those "
            f"of other conversations of the rollout included), got {len(rewards)}"
        )
    return [reward for reward in rewards if reward is not None]
