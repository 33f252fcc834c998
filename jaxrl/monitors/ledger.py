"""The ledger of a run: every dispatched rollout is in exactly one bucket, and the sums are checked each step.

In: one call when a rollout is dispatched and one at the event that decides it. Out: totals since the start of the run,
resumed parts included. The ledger never decides anything itself, and it keeps no rollout.

A rollout with several samples is `overlong_dropped` only if the packer dropped all of them, or cut off all that they would
have trained; it is `trained` if something of one is. Truncation is an attribute: a truncated rollout is counted in `truncated`
and in its bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxrl.errors import RunFailedError
from jaxrl.monitors.metrics import ledger_count
from jaxrl.types import Bucket, Rollout, filtered


class Ledger:
    """Counts rollouts by the bucket that they ended in.

    Example:
      >>> ledger = Ledger()
      >>> ledger.dispatch(8)
      >>> ledger.metrics()["ledger/pending"], ledger.metrics()["ledger/dispatched"]
      (8.0, 8.0)
    """

    def __init__(self, filter_names: Iterable[str] = ()) -> None:
        """Open an empty ledger; `filter_names` get a column each, also while they have dropped nothing."""
        self.dispatched = 0
        self.pending = 0
        self.truncated = 0
        self._columns = [str(b) for b in Bucket if b is not Bucket.PENDING] + [filtered(name) for name in filter_names]
        self._counts: Counter[str] = Counter()

    def dispatch(self, num_rollouts: int) -> None:
        """Enter rollouts that were just dispatched."""
        self.dispatched += num_rollouts
        self.pending += num_rollouts

    def decide(self, rollout: Rollout, bucket: str) -> None:
        """Enter what became of one dispatched rollout, and stamp the bucket on it.

        Args:
          rollout: still pending.
          bucket: a `Bucket` but pending, or `filtered(name)`.

        Raises:
          RunFailedError: the rollout was decided before, or none is pending: the pipeline lost count.
        """
        if rollout.bucket != Bucket.PENDING or self.pending == 0 or bucket == Bucket.PENDING:
            raise RunFailedError(
                f"ledger: member {rollout.member} of group {rollout.group_id!r} cannot become {str(bucket)!r}: it "
                f"already is {str(rollout.bucket)!r}, and {self.pending} rollouts are pending; a rollout must be "
                "decided exactly once"
            )
        rollout.bucket = str(bucket)
        self.pending -= 1
        self._counts[str(bucket)] += 1
        self.truncated += rollout.is_truncated

    def count(self, bucket: str) -> int:
        """Return how many rollouts ended in `bucket`."""
        return self._counts[str(bucket)]

    def check(self, num_held: int) -> None:
        """Check that the buckets add up, and that as many rollouts are pending as the pipeline holds.

        Args:
          num_held: rollouts that are in flight or queued, counted by those who hold them.

        Raises:
          RunFailedError: a rollout was lost or counted twice; the message has every count.
        """
        decided = self._counts.total()
        if decided + self.pending != self.dispatched or self.pending != num_held:
            buckets = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()))
            raise RunFailedError(
                f"ledger: {self.dispatched} rollouts were dispatched, {decided} are decided ({buckets or 'none'}) and "
                f"{self.pending} are pending, while the pipeline holds {num_held}; a rollout was lost or counted twice"
            )

    def metrics(self) -> dict[str, float]:
        """Return `ledger/<bucket>` totals since the start of the run, with `dispatched` and `truncated` beside them."""
        names = dict.fromkeys([*self._columns, *sorted(self._counts)])
        beside = {"pending": self.pending, "dispatched": self.dispatched, "truncated": self.truncated}
        totals = {name: self._counts[name] for name in names} | beside
        return {ledger_count(name): float(total) for name, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the decided counts; pending rollouts are played again after a restart, and so dispatched again."""
        return {"buckets": dict(self._counts), "truncated": self.truncated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the decided counts, with nothing pending."""
        self._counts = Counter(state["buckets"])
        self.truncated = int(state["truncated"])
        self.dispatched = self._counts.total()
        self.pending = 0
