"""The rules of the pipeline as pure functions: when to draw, what is too old, when to ship, when to measure.

In: numbers. Out: yes or no. The loops next door only ask; nothing here waits, counts or remembers. "Size" is in the
unit of a step's target: groups, or tokens when steps are counted in tokens.
"""

from __future__ import annotations

from jaxrl.types import staleness_steps


def lead_steps(step: int, version: int) -> int:
    """Return how many steps the collection of `step` is ahead of the policy that plays; 0 is on policy.

    Example:
      >>> lead_steps(step=3, version=2), lead_steps(step=3, version=0)
      (0, 2)
    """
    return staleness_steps(step, version)


def may_dispatch(step: int, version: int, async_level: int) -> bool:
    """Say whether a new group may be dispatched for `step` while the policy is at `version`.

    Example:
      >>> may_dispatch(step=3, version=1, async_level=1), may_dispatch(step=3, version=0, async_level=1)
      (True, False)
    """
    return lead_steps(step, version) <= async_level


def may_draw(*, kept: float, in_flight: float, needed: float, num_in_flight: int, max_in_flight: int) -> bool:
    """Say whether another group is wanted, apart from the policy's version.

    Args:
      kept: size of the groups that wait for a batch.
      in_flight: expected size of the groups that are drawn and not yet decided.
      needed: size that there is a use for: one step's when synchronous, that of all steps to come otherwise.
      num_in_flight: groups in flight.
      max_in_flight: how many there may be.

    Returns:
      True if a draw would neither exceed the use nor the bound.

    Example:
      >>> may_draw(kept=2, in_flight=1, needed=4, num_in_flight=1, max_in_flight=4)
      True
      >>> may_draw(kept=2, in_flight=2, needed=4, num_in_flight=2, max_in_flight=4)
      False
    """
    return num_in_flight < max_in_flight and kept + in_flight < needed


def expected_step(step: int, *, kept: float, in_flight: float, needed: float) -> int:
    """Return the step that a group drawn now would be trained at, if groups finish in the order of their draws.

    Args:
      step: the step being collected.
      kept: size of the groups that wait for a batch.
      in_flight: expected size of the groups that are drawn and not yet decided.
      needed: size of one step.

    Example:
      >>> [expected_step(3, kept=1, in_flight=n, needed=4) for n in (0, 2, 3, 8)]
      [3, 3, 4, 5]
    """
    return step + int((kept + in_flight) // needed)


def is_stale(step: int, oldest_version: int | None, max_staleness_steps: int) -> bool:
    """Say whether something sampled from `oldest_version` is too old to be trained on at `step`.

    Args:
      step: the 1-based step that would train on it.
      oldest_version: the oldest version of its tokens; None for a source that is not the policy, which never goes
        stale.
      max_staleness_steps: the bound, inclusive.

    Example:
      >>> [is_stale(step=10, oldest_version=v, max_staleness_steps=4) for v in (5, 4, None)]
      [False, True, False]
    """
    return oldest_version is not None and staleness_steps(step, oldest_version) > max_staleness_steps


def should_ship(*, kept: float, needed: float, num_in_flight: int, lead: int, async_level: int) -> bool:
    """Say whether the collected groups become the batch of the step.

    A synchronous run waits for every group that it drew, so that what is in a batch never depends on timing. An
    asynchronous one does not; it holds the batch while the trainer is more than `async_level` steps behind.

    Args:
      kept: size collected.
      needed: size of a step.
      num_in_flight: groups drawn and not yet decided.
      lead: `lead_steps` of the step.
      async_level: steps that generation may run ahead.

    Example:
      >>> should_ship(kept=4, needed=4, num_in_flight=1, lead=0, async_level=0)
      False
      >>> should_ship(kept=4, needed=4, num_in_flight=1, lead=1, async_level=1)
      True
    """
    return kept >= needed and lead <= async_level and (async_level > 0 or num_in_flight == 0)


def is_eval_due(previous: int, version: int, *, every_n_steps: int | None, last_version: int) -> bool:
    """Say whether the policy is measured when it goes from version `previous` to `version`.

    Due is every n-th version, also when an update passed over it, and the last one.

    Example:
      >>> is_eval_due(3, 4, every_n_steps=4, last_version=20), is_eval_due(3, 5, every_n_steps=4, last_version=20)
      (True, True)
      >>> is_eval_due(4, 5, every_n_steps=4, last_version=20), is_eval_due(19, 20, every_n_steps=None, last_version=20)
      (False, True)
    """
    is_nth = every_n_steps is not None and version // every_n_steps > previous // every_n_steps
    return is_nth or version == last_version


def is_eval_due_at_start(version: int, *, every_n_steps: int | None, last_version: int) -> bool:
    """Say whether the policy that a run starts from is to be measured: the base policy is, and one that a resumed run may owe.

    A run may end between a checkpoint and the measurement that was due there; whether it did, the folder of the run says.

    Example:
      >>> [is_eval_due_at_start(version, every_n_steps=4, last_version=10) for version in (0, 3, 4, 10)]
      [True, False, True, True]
    """
    return version in (0, last_version) or (every_n_steps is not None and version % every_n_steps == 0)
