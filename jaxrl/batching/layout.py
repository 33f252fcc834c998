"""Decides where each sample goes: rows filled by first fit, rows dealt to shards, and the flat stream of parts that results.

In: the lengths of the samples and the shape of a micro-batch. Out: the samples of every row, and a `Layout` that says where each
sample starts. Knows lengths only: what is laid there, and whether it may be, is the packer's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxrl.batching.balance import partition, split_to_multiple

_BLOCK_POSITIONS = 1 << 16
"""Segment and position ids are made in blocks of about so many positions, small enough to stay in the cache of a core."""


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

    sample_starts: np.ndarray
    """[P] int64, flat position of the first token of each packed sample."""
    part_starts: np.ndarray
    """[parts + 1] int64, flat position where each part starts, ascending; the last entry is the number of positions."""
    part_samples: np.ndarray
    """[parts] int64, packed sample that the part holds; -1 for padding."""
    part_segments: np.ndarray
    """[parts] int32, segment id of the part; 0 for padding."""

    @classmethod
    def of(cls, grid: Sequence[Sequence[int]], lengths: Sequence[int], row_length: int) -> Layout:
        """Lay out the rows of `plan_rows`."""
        samples = np.fromiter(chain.from_iterable(grid), np.int64, len(lengths))
        num_segments = np.fromiter(map(len, grid), np.int64, len(grid))
        first_of_row = np.cumsum(num_segments) - num_segments
        row = np.repeat(np.arange(len(grid)), num_segments)
        # Tokens of all samples before the first one of each row, and behind the last one at the end.
        ends = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64)[samples])])
        before_row = ends[first_of_row]
        starts = ends[:-1] - before_row[row] + row * row_length
        used = ends[first_of_row + num_segments] - before_row
        short = np.flatnonzero(used < row_length)
        part_starts = np.concatenate([starts, short * row_length + used[short]])
        order = np.argsort(part_starts)
        sample_starts = np.empty(len(lengths), np.int64)
        sample_starts[samples] = starts
        padding = np.zeros(len(short), np.int64)
        return cls(
            sample_starts,
            np.append(part_starts[order], len(grid) * row_length),
            np.concatenate([samples, padding - 1])[order],
            np.concatenate([np.arange(len(row)) - first_of_row[row] + 1, padding])[order].astype(np.int32),
        )

    @property
    def num_positions(self) -> int:
        """Positions of all rows together."""
        return int(self.part_starts[-1])

    @property
    def paddings(self) -> list[slice]:
        """Flat positions of every padding."""
        parts = np.flatnonzero(self.part_samples < 0)
        return list(map(slice, self.part_starts[parts].tolist(), self.part_starts[parts + 1].tolist()))

    def write_segments_and_positions(self, segment_ids: np.ndarray, position_ids: np.ndarray) -> None:
        """Fill two [positions] int32 arrays: segment ids, and positions that restart at 0 in every part."""
        lengths = np.diff(self.part_starts)
        marks = np.searchsorted(self.part_starts[:-1], np.arange(0, self.num_positions, _BLOCK_POSITIONS)).tolist()
        ramp = np.arange(self.num_positions if len(marks) < 2 else int(np.diff(self.part_starts[[*marks, -1]]).max()), dtype=np.int32)
        for part, end in zip(marks, [*marks[1:], len(lengths)], strict=True):
            if part == end:
                continue
            start, stop = self.part_starts[part], self.part_starts[end]
            inside = lengths[part:end]
            segment_ids[start:stop] = np.repeat(self.part_segments[part:end], inside)
            offsets = (self.part_starts[part:end] - start).astype(np.int32)
            np.subtract(ramp[: stop - start], np.repeat(offsets, inside), out=position_ids[start:stop])

    def sample_at(self, flat_position: int) -> int:
        """Return the packed sample that holds a position of the flat token stream."""
        return int(self.part_samples[np.searchsorted(self.part_starts, flat_position, side="right") - 1])
