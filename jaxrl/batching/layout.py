"""Decides where each sample goes: rows filled by first fit, rows dealt to shards, and the flat stream of parts that results.

In: the lengths of the samples and the shape of a micro-batch. Out: the samples of every row, and a `Layout` that says where each
sample starts. Knows lengths only: what is laid there, and whether it may be, is the packer's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.batching.balance import partition, split_to_multiple


def first_fit_decreasing(lengths: Sequence[int], capacity: int, max_items: int) -> list[list[int]]:
    """Put each item, longest first, into the first bin that has room for it.

    A bin has room if the item fits and the bin holds fewer than `max_items`; otherwise a new bin is opened. Items of one length keep
    their order. Bins are filled one after another, which gives the same bins: what first fit puts into a bin is, of the items that
    earlier bins left over, always the longest that still fits, and a bisection finds it.

    Args:
      lengths: [N] int, each in 1..capacity.
      capacity: total length of a bin.
      max_items: items of one bin at most.

    Returns:
      Bins in the order of opening, each with its items' indices in the order of arrival.

    Example:
      >>> first_fit_decreasing([3, 7, 2, 6, 4], capacity=9, max_items=8)
      [[1, 2], [3, 0], [4]]

    Reference: Johnson 1973, Near-optimal bin packing algorithms;
      https://en.wikipedia.org/wiki/First-fit-decreasing_bin_packing.
    """
    falling = -np.asarray(lengths, np.int64)
    order_by_length = np.argsort(falling, kind="stable")
    order, falling = order_by_length.tolist(), falling[order_by_length].tolist()
    num_items = len(order)
    # Entry p leads to the first place at or after p whose item is in no bin: p itself, or a place nearer to it.
    onward = list(range(num_items + 1))
    bins: list[list[int]] = []
    first = 0
    while True:
        while onward[first] != first:
            first = onward[first]
        if first == num_items:
            return bins
        chosen: list[int] = []
        room, place = capacity, first
        while place < num_items:
            chosen.append(order[place])
            room += falling[place]
            onward[place] = place + 1
            if len(chosen) == max_items:
                break
            place = bisect_left(falling, -room, place + 1)
            while onward[place] != place:
                onward[place] = place = onward[onward[place]]
        bins.append(chosen)


def plan_rows(
    lengths: Sequence[int], row_length: int, rows: int, shards: int, max_segments: int, attention_cost: float
) -> list[list[int]]:
    """Return the samples of each row, all micro-batches' rows one after another; `[]` is a dummy row.

    Args:
      lengths: [P] int, each in 1..row_length.
      row_length: T, positions of a row.
      rows: rows of a micro-batch on each shard.
      shards: shards that the rows are split over.
      max_segments: samples of one row at most.
      attention_cost: cost of one attended pair of positions over the dense cost of one token.

    Returns:
      `micro-batches * shards * rows` lists of sample indices.
    """
    sizes = np.asarray(lengths, np.float64)
    costs: list[float] = (sizes + attention_cost * sizes * sizes).tolist()
    bins = first_fit_decreasing(lengths, row_length, max_segments)
    if len(bins) % shards:
        bins = split_to_multiple(bins, costs, shards)
        bins += [[] for _ in range(-len(bins) % shards)]
    loads = [sum([costs[i] for i in items]) for items in bins]
    num_micro_batches = -(-len(bins) // (shards * rows))
    grid: list[list[int]] = [[] for _ in range(num_micro_batches * shards * rows)]
    for shard, part in enumerate(partition(loads, shards)):
        for place, b in enumerate(sorted(part, key=lambda b: -loads[b])):
            micro_batch, row = divmod(place, rows)
            grid[(micro_batch * shards + shard) * rows + row] = bins[b]
    return grid


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat token stream of all rows of all micro-batches, in parts: a sample, or the padding that ends a row."""

    row_length: int
    parts: list[int]
    """Per part, its packed sample, or `P + k` for the k-th padding."""
    starts: np.ndarray
    """[parts + 1] int64, flat position where each part starts, ascending; the last entry is the number of positions."""
    segments: np.ndarray
    """[parts] int32, segment id of the part; 0 for padding."""
    first_parts: list[int]
    """[rows + 1], first part of each row; the last entry is the number of parts."""
    padding_lengths: list[int]
    """Number of positions of each padding, `>= 1`."""

    @classmethod
    def of(cls, grid: Sequence[Sequence[int]], lengths: Sequence[int], row_length: int) -> Layout:
        """Lay out the rows of `plan_rows`."""
        parts: list[int] = []
        segments: list[int] = []
        first_parts: list[int] = []
        padding_lengths: list[int] = []
        for items in grid:
            first_parts.append(len(parts))
            parts += items
            segments += range(1, len(items) + 1)
            if padding := row_length - sum([lengths[i] for i in items]):
                parts.append(len(lengths) + len(padding_lengths))
                segments.append(0)
                padding_lengths.append(padding)
        part_lengths = np.asarray([*lengths, *padding_lengths], np.int64)[parts]
        starts = np.concatenate([[0], np.cumsum(part_lengths)])
        return cls(row_length, parts, starts, np.asarray(segments, np.int32), [*first_parts, len(parts)], padding_lengths)

    @property
    def num_rows(self) -> int:
        """Rows of all micro-batches together."""
        return len(self.first_parts) - 1

    def in_order(self, arrays: Sequence[np.ndarray], padding: np.generic) -> list[np.ndarray]:
        """Return the array of every part: those of the packed samples, given in order, and views of `padding`."""
        blank = np.full(self.row_length, padding)
        return [*map([*arrays, *[blank[:length] for length in self.padding_lengths]].__getitem__, self.parts)]

    def segments_and_positions(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return two [positions of some rows] int32 arrays: segment ids, and positions that restart at 0 in every part."""
        inside = slice(self.first_parts[rows.start], self.first_parts[rows.stop])
        starts = self.starts[inside.start : inside.stop + 1]
        lengths = np.diff(starts)
        ramp = np.arange(starts[-1] - starts[0], dtype=np.int32)
        ramp -= np.repeat((starts[:-1] - starts[0]).astype(np.int32), lengths)
        return np.repeat(self.segments[inside], lengths), ramp

    def first_positions(self, rows: slice) -> np.ndarray:
        """Return where the samples of some rows start, counted from the first position of these rows."""
        inside = slice(self.first_parts[rows.start], self.first_parts[rows.stop])
        starts = self.starts[inside]
        return starts[self.segments[inside] > 0] - rows.start * self.row_length

    def sample_at(self, flat_position: int) -> int:
        """Return the packed sample that holds a position of the flat token stream."""
        return self.parts[int(np.searchsorted(self.starts, flat_position, side="right")) - 1]
