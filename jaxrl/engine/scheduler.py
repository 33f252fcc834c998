"""Which waiting request gets which slot, and which prompts are prefilled together: first in, first out.

In go tickets (requests with their futures, opaque here) and prompts; out come slot assignments and `PrefillCall`s of a
closed set of shapes. Nothing here touches a device or looks at a sampled token.

Shape letters: R prefill rows, T bucket length, N insertions (one per slot at most).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


def bucket_lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the closed set of row lengths: numbers of two significant bits from `shortest` on, and `longest` itself.

    At most a third of a row is padding (above the shortest bucket), with two shapes per octave.

    Args:
      shortest: no bucket is shorter than this, unless `longest` is; >= 1.
      longest: the last bucket; >= 1.

    Returns:
      Strictly increasing lengths.

    Example:
      >>> bucket_lengths(16, 80)
      (16, 24, 32, 48, 64, 80)
      >>> bucket_lengths(16, 12)
      (12,)
    """
    candidates = sorted({1, *(2**k for k in range(1, 32)), *(3 * 2**k for k in range(31))})
    return (*(n for n in candidates if shortest <= n < longest), longest)


def smallest_bucket(buckets: Sequence[int], length: int) -> int:
    """Return the shortest bucket that holds `length` tokens; `length` must not exceed the last one."""
    return buckets[bisect.bisect_left(buckets, length)]


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """One call of the prefill program."""

    token_ids: np.ndarray
    """[R, T] int32, right-padded with 0."""
    rows: np.ndarray
    """[N] int32, the row that goes to `slots[n]`."""
    slots: np.ndarray
    """[N] int32; the number of slots where there is nothing to insert."""
    num_tokens: int
    """Prompt tokens computed; a prompt shared by several slots counts once."""


def plan_prefills(prompts: Sequence[tuple[int, np.ndarray]], *, buckets: Sequence[int], num_rows: int, num_slots: int) -> list[PrefillCall]:
    """Arrange prompts into calls of fixed shapes.

    The last token of a prompt is left out: the first decode step feeds it, so that every token is sampled by one
    program. Equal prompts are computed once and copied to each of their slots (the members of a group mostly arrive
    together). A prompt's bucket depends on its own length only, so that its keys are the same whatever else is in the
    call.

    Args:
      prompts: slot and [P] int32 token ids of each prompt, at most one per slot.
      buckets: from `bucket_lengths`.
      num_rows: rows of every call.
      num_slots: slots of the engine.

    Returns:
      Calls that together fill every slot whose prompt has two or more tokens.
    """
    slots_of: dict[int, dict[bytes, list[int]]] = {}
    for slot, token_ids in prompts:
        if len(token_ids) > 1:
            bucket = smallest_bucket(buckets, len(token_ids) - 1)
            slots_of.setdefault(bucket, {}).setdefault(token_ids[:-1].tobytes(), []).append(slot)
    calls = []
    for bucket, slots_of_prompt in slots_of.items():
        distinct = list(slots_of_prompt.items())
        for start in range(0, len(distinct), num_rows):
            calls.append(_fill_call(distinct[start : start + num_rows], bucket, num_rows, num_slots))
    return calls


def _fill_call(distinct: list[tuple[bytes, list[int]]], bucket: int, num_rows: int, num_slots: int) -> PrefillCall:
    token_ids = np.zeros((num_rows, bucket), np.int32)
    rows, slots = np.zeros(num_slots, np.int32), np.full(num_slots, num_slots, np.int32)
    num_tokens = num_insertions = 0
    for row, (prompt, prompt_slots) in enumerate(distinct):
        ids = np.frombuffer(prompt, np.int32)
        token_ids[row, : len(ids)] = ids
        num_tokens += len(ids)
        here = slice(num_insertions, num_insertions + len(prompt_slots))
        rows[here], slots[here] = row, prompt_slots
        num_insertions = here.stop
    return PrefillCall(token_ids, rows, slots, num_tokens)


class Scheduler(Generic[T]):
    """Slots and a queue: the ticket that waited longest takes the lowest free slot."""

    def __init__(self, num_slots: int) -> None:
        """Start with every slot free."""
        self.running: dict[int, T] = {}
        """Ticket by slot."""
        self._waiting: dict[str, T] = {}
        self._free = list(range(num_slots))

    @property
    def num_waiting(self) -> int:
        """Tickets without a slot."""
        return len(self._waiting)

    def add(self, key: str, ticket: T) -> None:
        """Put a ticket at the end of the queue under a key that is unique among waiting ones."""
        assert key not in self._waiting
        self._waiting[key] = ticket

    def withdraw(self, key: str) -> T | None:
        """Take a ticket out of the queue; None if it is not waiting."""
        return self._waiting.pop(key, None)

    def admit(self) -> list[tuple[int, T]]:
        """Give free slots to waiting tickets, in order of arrival; return slot and ticket of each."""
        admitted = []
        while self._free and self._waiting:
            key = next(iter(self._waiting))
            slot, ticket = self._free.pop(0), self._waiting.pop(key)
            self.running[slot] = ticket
            admitted.append((slot, ticket))
        return admitted

    def release(self, slot: int) -> T:
        """Free a running slot and return its ticket."""
        bisect.insort(self._free, slot)
        return self.running.pop(slot)
