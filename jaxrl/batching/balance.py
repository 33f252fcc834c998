"""Spreads rows of unequal work evenly over shards.

In: the cost of each row (or of each sample). Out: rows split where shards would stay empty, and a partition of rows
into groups of equal count and nearly equal cost. Knows nothing of tokens or streams; what a row costs is decided by the
caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split items into `num_parts` groups of equal count and nearly equal total cost.

    Karmarkar-Karp largest differencing, kept to equal counts: items are sorted by decreasing cost and cut into chunks
    of `num_parts`; each chunk is a partial solution with one item per group. The two partial solutions of largest
    spread (largest minus smallest group) are merged, the largest group of one joining the smallest of the other, until
    one is left. A merge never widens the larger spread, so the final spread is at most that of the widest chunk.

    Args:
      costs: [N] float, cost of each item, any unit; N is a multiple of `num_parts`.
      num_parts: number of groups, `>= 1`.

    Returns:
      `num_parts` lists of `N / num_parts` item indices, each list ascending.

    Raises:
      ValueError: N is not a multiple of `num_parts`.

    Example:
      >>> partition([8, 7, 6, 5, 4, 3], 3)
      [[0, 5], [1, 4], [2, 3]]

    Reference: Karmarkar and Karp 1982, The differencing method of set partitioning; BLDM, the equal-count variant:
      https://en.wikipedia.org/wiki/Largest_differencing_method.
    """
    if num_parts < 1 or len(costs) % num_parts:
        raise ValueError(f"{len(costs)} items cannot be split into {num_parts} groups of equal count")
    if num_parts == 1:
        return [list(range(len(costs)))]
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    chunks = [order[start : start + num_parts] for start in range(0, len(order), num_parts)]
    # A partial solution is its groups, (cost, items) by decreasing cost. The serial number keeps the heap off comparing
    # groups.
    heap = []
    for serial, chunk in enumerate(chunks):
        groups = [(costs[i], [i]) for i in chunk]
        heap.append((groups[-1][0] - groups[0][0], serial, groups))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, wide = heapq.heappop(heap)
        _, _, narrow = heapq.heappop(heap)
        merged = [(a + b, xs + ys) for (a, xs), (b, ys) in zip(wide, reversed(narrow), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def split_to_multiple(bins: Sequence[Sequence[int]], costs: Sequence[float], multiple: int) -> list[list[int]]:
    """Split the heaviest bins until their number is a multiple of `multiple`, or nothing can be split.

    The heaviest bin of more than one item (the later one, on a tie) gives its items, by decreasing cost, to whichever
    half is lighter; the first half keeps the bin's place and the second is appended. With `multiple` 1 nothing is
    split.

    Args:
      bins: item indices per bin; no bin is empty.
      costs: [N] float, cost of each item, any unit.
      multiple: `>= 1`, the number of shards.

    Returns:
      New bins holding the same items; fewer than the next multiple only if every bin has one item.

    Example:
      >>> split_to_multiple([[0, 1], [2, 3], [4, 5]], [6, 6, 5, 5, 4, 4], 4)
      [[0], [2, 3], [4, 5], [1]]
    """
    result = [list(items) for items in bins]
    target = -(-len(result) // multiple) * multiple
    heap = [(-sum(costs[i] for i in items), -b) for b, items in enumerate(result) if len(items) > 1]
    heapq.heapify(heap)
    while len(result) < target and heap:
        place = -heapq.heappop(heap)[1]
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for item in sorted(result[place], key=lambda i: -costs[i]):
            side = 0 if loads[0] <= loads[1] else 1
            halves[side].append(item)
            loads[side] += costs[item]
        result[place] = halves[0]
        result.append(halves[1])
        for where, half, load in ((place, halves[0], loads[0]), (len(result) - 1, halves[1], loads[1])):
            if len(half) > 1:
                heapq.heappush(heap, (-load, -where))
    return result
