"""Files an exception under the rollout that it ended: a failed rollout is data, and never ends the run by itself."""

from __future__ import annotations

import asyncio

from jaxrl.types import Boundary, Failure, Rollout


def mark_failed(rollout: Rollout, boundary: Boundary, error: BaseException | str, *, kind: str | None = None) -> None:
    """Give `rollout` a failure instead of a reward; the first failure of a rollout stays.

    Args:
      rollout: changed in place: `failure` is set and `reward` becomes None.
      boundary: where it failed.
      error: the exception, or a sentence.
      kind: name of the failure; None takes the exception's class.
    """
    rollout.reward = None
    if rollout.failure is None:
        rollout.failure = Failure(
            boundary=boundary, type=kind or type(error).__name__, message=str(error) or repr(error)
        )


def is_cancelled_by_owner() -> bool:
    """Say whether the current task was asked to end, as opposed to awaiting something that somebody else cancelled.

    Without the difference, a request that its endpoint cancelled would end a rollout silently, and its group never.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
