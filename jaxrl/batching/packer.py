"""Packs samples into static-shape micro-batches: the one place where lists of tokens become rectangles.

In: samples of any length, env and mix of streams. Out: a `TrainBatch` whose micro-batches all have the shape `[shards *
rows, row_length]`, with rows balanced over shards and the member counts that the loss divides by. Samples are never
split, reordered inside, or cut silently, and nothing here knows which algorithm stamped a stream.

Legend: N samples, P packed samples (N without the dropped), M micro-batches, R rows of a micro-batch (all shards), T
positions, S segments.

Frozen and demonstration samples hold 0.0 as inference logprob and must have no rl or ref_kl member. A logprob of 0.0 is
also what a live policy gives a token of probability 1, so that rule cannot be checked here: whoever stamps streams
knows the source and keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from jaxrl.batching.balance import partition, split_to_multiple
from jaxrl.errors import PackingError
from jaxrl.types import (
    COMPONENTS,
    OPTIONAL_STREAMS,
    STREAM_FILL,
    Members,
    MicroBatch,
    TrainBatch,
    TrainingSample,
    component_members,
)

DEFAULT_ATTENTION_COST = 1e-4
"""Cost of one attended pair over the dense cost of a token. At 1e-4, attention over 10,000 positions costs as much as
the dense layers do, which is the order of a 0.6B model."""

REQUIRED_STREAMS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "temperatures": np.float32,
}
"""Per-token arrays that every sample has, with the dtype that a micro-batch holds them in."""

COMPONENT_READS = {
    "rl": ("advantages", "rl_weights", "inference_logprobs"),
    "ce": ("ce_weights",),
    "ref_kl": ("ref_kl_weights", "ref_logprobs", "inference_logprobs"),
}
"""Streams whose value at a member token enters that component's loss."""


def pack(
    samples: Sequence[TrainingSample],
    *,
    row_length: int,
    rows: int,
    shards: int,
    step: int = 1,
    max_segments: int = 32,
    overlong: Literal["drop", "truncate"] = "drop",
    context_shards: int = 1,
    attention_cost: float = DEFAULT_ATTENTION_COST,
) -> TrainBatch:
    """Pack samples into micro-batches of one static shape, balanced over shards.

    First-fit decreasing by length fills rows; the heaviest rows are split until their number is a multiple of `shards`;
    rows are then dealt so that every shard has equally many and nearly equal work, heaviest first, so that the shards'
    rows of one micro-batch match too. What is missing is filled with dummy rows of padding. The work of a row is
    `sum(L) + attention_cost * sum(L**2)` over its samples.

    A stream is present in a micro-batch if one of its samples has it; the others get its identity (`STREAM_FILL`) and
    padding gets 0.0. Row `r` of a micro-batch belongs to shard `r // rows`.

    Args:
      samples: N samples; env, temperature and streams may differ.
      row_length: T, positions of a row; a multiple of `context_shards`.
      rows: rows of a micro-batch on each shard.
      shards: shards that the rows are split over (data x fsdp).
      step: the 1-based optimizer step that the batch is for.
      max_segments: S, samples packed into one row at most.
      overlong: what happens to a sample longer than a row: `drop` it or `truncate` it on the right. Either way its
        index in `samples` is in `TrainBatch.overlong`.
      context_shards: shards that the positions of a row are split over; they only change how members are counted.
      attention_cost: cost of one attended pair of positions over the dense cost of one token.

    Returns:
      A batch whose `sample_index` speaks of the packed samples: `samples` without the dropped ones, in order.
      `member_counts` is `[shards * context_shards, 3]`, context shards of one row shard next to each other.

    Raises:
      PackingError: nothing to pack; a shape argument is impossible; a sample is empty or its arrays disagree in length;
        live rl tokens without `advantages`; ref_kl members without `ref_logprobs`; a member at the first token of a
        sample; a value that the loss would read is not finite; a temperature is not above 0.

    Example:
      >>> def sample(length):
      ...     ones = np.ones(length, np.float32)
      ...     return TrainingSample(token_ids=np.arange(length, dtype=np.int32), loss_mask=np.arange(length) > 0,
      ...                           inference_logprobs=-ones, temperatures=ones, env_name="toy", advantages=ones)
      >>> batch = pack([sample(3), sample(4), sample(2)], step=1, row_length=6, rows=1, shards=1)
      >>> batch.num_tokens, [m.segment_ids.tolist() for m in batch.micro_batches]
      (9, [[[1, 1, 1, 1, 2, 2]], [[1, 1, 1, 0, 0, 0]]])
      >>> batch.member_counts.tolist()
      [[6, 0, 0]]
    """
    _check_arguments(row_length, rows, shards, max_segments, overlong, context_shards)
    _check_lengths(samples)
    _check_credit(samples)
    packed, overlong_indices = _fit_to_row(samples, row_length, overlong)
    lengths = [len(sample.token_ids) for sample in packed]
    grid = _plan(lengths, row_length, rows, shards, max_segments, attention_cost)
    layout = _Layout.of(grid, lengths, row_length)
    streams = _fill(packed, layout)
    streams["segment_ids"], streams["position_ids"] = layout.segments_and_positions()
    is_real = streams["segment_ids"] > 0
    rl_weights, ce_weights, ref_kl_weights = (streams.get(name) for name in ("rl_weights", "ce_weights", "ref_kl_weights"))
    members = component_members(streams["loss_mask"], rl_weights, ce_weights, ref_kl_weights, is_real)
    _check_first_tokens(members, layout, packed)
    _check_values(streams, members, is_real, layout, packed)
    batch = TrainBatch(
        step=step,
        micro_batches=_micro_batches(packed, grid, streams, shards * rows, max_segments),
        member_counts=_count_members(members, shards, rows, context_shards, row_length),
        num_samples=len(packed),
        num_tokens=sum(lengths),
        num_loss_tokens=int(np.count_nonzero(members.rl | members.ce | members.ref_kl)),
        overlong=overlong_indices,
    )
    _assert_shapes(batch, shards * rows, row_length, max_segments, shards * context_shards)
    return batch


def first_fit_decreasing(lengths: Sequence[int], capacity: int, max_items: int) -> list[list[int]]:
    """Put each item, longest first, into the first bin that has room for it.

    A bin has room if the item fits and the bin holds fewer than `max_items`; otherwise a new bin is opened. Items of
    one length keep their order. A tree of the room left under each node finds the first bin in O(log n).

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
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    # Two neighbouring bins that are short of `max_items` are together fuller than one bin, which bounds how many bins
    # can be opened.
    most_bins = min(len(order), 2 * -(-sum(lengths) // capacity) + 1 + len(order) // max_items)
    num_leaves = 1 << max(0, most_bins - 1).bit_length()
    room = [capacity] * (2 * num_leaves)
    bins: list[list[int]] = []
    for item in order:
        length = lengths[item]
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - num_leaves == len(bins):
            bins.append([])
        chosen = bins[node - num_leaves]
        chosen.append(item)
        room[node] = room[node] - length if len(chosen) < max_items else 0
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                break
            room[node] = most
    return bins


def _check_arguments(
    row_length: int, rows: int, shards: int, max_segments: int, overlong: str, context_shards: int
) -> None:
    sizes = {
        "row_length": row_length,
        "rows": rows,
        "shards": shards,
        "max_segments": max_segments,
        "context_shards": context_shards,
    }
    for name, size in sizes.items():
        if size < 1:
            raise PackingError(f"`{name}`={size!r} must be at least 1")
    if overlong not in ("drop", "truncate"):
        raise PackingError(f"`overlong`={overlong!r} must be 'drop' or 'truncate'")
    if row_length % context_shards:
        raise PackingError(
            f"`row_length`={row_length} is not divisible by `context_shards`={context_shards}; "
            "every shard holds an equal slice of a row"
        )


def _check_lengths(samples: Sequence[TrainingSample]) -> None:
    """Refuse an empty sample, and one whose arrays disagree in length."""
    lengths = [len(sample.token_ids) for sample in samples]
    if 0 in lengths:
        index = lengths.index(0)
        raise PackingError(f"{_name(samples[index], index)}: it has no tokens")
    for name in (*REQUIRED_STREAMS, *OPTIONAL_STREAMS):
        arrays = [getattr(sample, name) for sample in samples]
        entries = [length if array is None else len(array) for array, length in zip(arrays, lengths, strict=True)]
        if entries != lengths:
            index = next(i for i, length in enumerate(lengths) if entries[i] != length)
            raise PackingError(
                f"{_name(samples[index], index)}: `{name}` has {entries[index]} entries for {lengths[index]} tokens"
            )


def _check_credit(samples: Sequence[TrainingSample]) -> None:
    """Refuse live rl tokens without advantages and ref_kl members without a reference."""
    for index, sample in enumerate(samples):
        if sample.advantages is None:
            weights = sample.rl_weights
            if np.any(sample.loss_mask if weights is None else sample.loss_mask & (weights != 0)):
                raise PackingError(
                    f"{_name(sample, index)}: it has live rl tokens but no `advantages`; its algorithm must assign "
                    "them (zeros count as assigned) or route the tokens to another component with `rl_weights` 0"
                )
        if sample.ref_kl_weights is not None and sample.ref_logprobs is None and np.any(sample.ref_kl_weights):
            raise PackingError(f"{_name(sample, index)}: it has ref_kl members but no `ref_logprobs`")


def _fit_to_row(
    samples: Sequence[TrainingSample], row_length: int, overlong: str
) -> tuple[list[TrainingSample], list[int]]:
    """Return the samples to pack, none longer than a row, and the indices of those that were."""
    packed: list[TrainingSample] = []
    overlong_indices: list[int] = []
    for index, sample in enumerate(samples):
        if len(sample.token_ids) <= row_length:
            packed.append(sample)
            continue
        overlong_indices.append(index)
        if overlong == "truncate":
            packed.append(_truncate(sample, row_length))
    if not packed:
        raise PackingError(
            f"nothing to pack: {len(samples)} samples, {len(overlong_indices)} of them dropped as longer than a row of "
            f"{row_length} tokens"
        )
    return packed, overlong_indices


def _truncate(sample: TrainingSample, length: int) -> TrainingSample:
    names = (*REQUIRED_STREAMS, *OPTIONAL_STREAMS)
    streams = {name: getattr(sample, name) for name in names}
    return msgspec.structs.replace(
        sample, **{name: stream[:length] for name, stream in streams.items() if stream is not None}
    )


def _plan(
    lengths: list[int], row_length: int, rows: int, shards: int, max_segments: int, attention_cost: float
) -> list[list[int]]:
    """Return the samples of each row, all micro-batches' rows one after another; `[]` is a dummy row."""
    costs = [length + attention_cost * length * length for length in lengths]
    bins = split_to_multiple(first_fit_decreasing(lengths, row_length, max_segments), costs, shards)
    bins += [[] for _ in range(-len(bins) % shards)]
    loads = [sum(costs[i] for i in items) for items in bins]
    num_micro_batches = -(-len(bins) // (shards * rows))
    grid: list[list[int]] = [[] for _ in range(num_micro_batches * shards * rows)]
    for shard, part in enumerate(partition(loads, shards)):
        for place, b in enumerate(sorted(part, key=lambda b: -loads[b])):
            micro_batch, row = divmod(place, rows)
            grid[(micro_batch * shards + shard) * rows + row] = bins[b]
    return grid


@dataclass(frozen=True, slots=True)
class _Layout:
    """The flat token stream of all rows of all micro-batches, in parts: a sample, or the padding that ends a row."""

    samples: list[int]
    """Per part, its packed sample; -1 for padding."""
    lengths: list[int]
    """Per part, its number of positions, `>= 1`."""
    segments: list[int]
    """Per part, its segment id; 0 for padding."""
    row_length: int
    num_rows: int

    @classmethod
    def of(cls, grid: list[list[int]], lengths: list[int], row_length: int) -> _Layout:
        parts: list[tuple[int, int, int]] = []
        for items in grid:
            parts.extend((i, lengths[i], segment) for segment, i in enumerate(items, start=1))
            if padding := row_length - sum(lengths[i] for i in items):
                parts.append((-1, padding, 0))
        samples, part_lengths, segments = (list(column) for column in zip(*parts, strict=True))
        return cls(samples, part_lengths, segments, row_length, len(grid))

    @property
    def starts(self) -> np.ndarray:
        """[parts] int64, flat position of each part's first token."""
        return np.cumsum([0, *self.lengths[:-1]])

    def lay(self, arrays: Sequence[np.ndarray], padding: np.generic) -> np.ndarray:
        """Return [num_rows, row_length]: each sample's array in its place, `padding` elsewhere."""
        blank = np.full(self.row_length, padding)
        parts = [blank[:length] if i < 0 else arrays[i] for i, length in zip(self.samples, self.lengths, strict=True)]
        out = np.empty(self.num_rows * self.row_length, blank.dtype)
        np.concatenate(parts, out=out, casting="same_kind")
        return out.reshape(self.num_rows, self.row_length)

    def segments_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two [num_rows, row_length] int32 arrays: segment ids, and positions that restart in every part."""
        shape = (self.num_rows, self.row_length)
        ramp = np.arange(self.row_length, dtype=np.int32)
        positions = np.concatenate([ramp[:length] for length in self.lengths])
        return np.repeat(np.asarray(self.segments, np.int32), self.lengths).reshape(shape), positions.reshape(shape)

    def sample_at(self, flat_position: int) -> int:
        """Return the packed sample that holds a position of the flat token stream."""
        return self.samples[int(np.searchsorted(self.starts, flat_position, side="right")) - 1]


def _fill(packed: list[TrainingSample], layout: _Layout) -> dict[str, np.ndarray]:
    """Lay out the required arrays, and each optional stream that some sample has, as [rows of all micro-batches, T]."""
    lengths = [len(sample.token_ids) for sample in packed]
    streams: dict[str, np.ndarray] = {}
    for name in (*REQUIRED_STREAMS, *OPTIONAL_STREAMS):
        arrays = [getattr(sample, name) for sample in packed]
        if name in OPTIONAL_STREAMS:
            if all(array is None for array in arrays):
                continue
            identity = np.full(layout.row_length, STREAM_FILL[name], np.float32)
            arrays = [
                identity[:length] if array is None else array for array, length in zip(arrays, lengths, strict=True)
            ]
        padding = REQUIRED_STREAMS.get(name, np.float32)(1 if name == "temperatures" else 0)
        try:
            streams[name] = layout.lay(arrays, padding)
        except (TypeError, ValueError) as error:
            kinds = sorted({f"{array.dtype}{list(array.shape[1:]) or ''}" for array in arrays})
            raise PackingError(f"`{name}` must be one-dimensional {padding.dtype} arrays, got {kinds}") from error
    return streams


def _check_first_tokens(members: Members, layout: _Layout, packed: list[TrainingSample]) -> None:
    """Invariant: the first token of a segment has no context, so it is never a member."""
    firsts = layout.starts[np.asarray(layout.samples) >= 0]
    for component, member in zip(COMPONENTS, members, strict=True):
        bad = firsts[member.ravel()[firsts]]
        if bad.size:
            index = layout.sample_at(bad[0])
            raise PackingError(
                f"{_name(packed[index], index, 'packed sample')}: its first token is a {component} member, but has no "
                "context to be predicted from"
            )


def _check_values(
    streams: dict[str, np.ndarray], members: Members, is_real: np.ndarray, layout: _Layout, packed: list[TrainingSample]
) -> None:
    """Refuse a value that the loss would read and that is not finite, and a temperature that cannot divide logits."""

    def refuse(bad: np.ndarray, name: str, where: str) -> None:
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            index = layout.sample_at(at)
            value = float(streams[name].ravel()[at])
            raise PackingError(f"{_name(packed[index], index, 'packed sample')}: `{name}` holds {value!r} at {where}")

    # A finite sum proves every term finite; a sum that is not (it may only have overflowed) sends the stream to the
    # exact test.
    with np.errstate(all="ignore"):
        suspects = {n for n, s in streams.items() if s.dtype == np.float32 and not np.isfinite(s.sum())}
    for component, member in zip(COMPONENTS, members, strict=True):
        for name in suspects.intersection(COMPONENT_READS[component]):
            refuse(member & ~np.isfinite(streams[name]), name, f"a {component} member; it must be finite")
    temperatures = streams["temperatures"]
    if "temperatures" in suspects or not temperatures.min() > 0:
        legal = np.isfinite(temperatures) & (temperatures > 0)
        refuse(is_real & ~legal, "temperatures", "a token; it must be finite and above 0")


def _count_members(members: Members, shards: int, rows: int, context_shards: int, row_length: int) -> np.ndarray:
    """Return [shards * context_shards, 3] int32: members in each shard's own slice of rows and positions."""
    shape = (-1, shards, rows, context_shards, row_length // context_shards)
    blocks = [member.reshape(shape) for member in members]
    return np.array(
        [
            [np.count_nonzero(block[:, shard, :, context]) for block in blocks]
            for shard in range(shards)
            for context in range(context_shards)
        ],
        np.int32,
    )


def _micro_batches(
    packed: list[TrainingSample],
    grid: list[list[int]],
    streams: dict[str, np.ndarray],
    num_rows: int,
    max_segments: int,
) -> list[MicroBatch]:
    """Cut the filled streams into micro-batches, leaving out the streams that none of a micro-batch's samples has."""
    sample_index = np.full((len(grid), max_segments), -1, np.int32)
    for row, items in enumerate(grid):
        sample_index[row, : len(items)] = items
    micro_batches = []
    for start in range(0, len(grid), num_rows):
        own = slice(start, start + num_rows)
        inside = [packed[i] for items in grid[own] for i in items]
        present = {
            name: stream[own]
            for name, stream in streams.items()
            if name not in OPTIONAL_STREAMS or any(getattr(sample, name) is not None for sample in inside)
        }
        micro_batches.append(MicroBatch(**present, sample_index=sample_index[own]))
    return micro_batches


def _assert_shapes(batch: TrainBatch, num_rows: int, row_length: int, max_segments: int, num_counts: int) -> None:
    """Pin the shape and dtype of everything that leaves the packer."""
    expected = {name: ((num_rows, row_length), np.dtype(dtype)) for name, dtype in REQUIRED_STREAMS.items()}
    expected |= {name: ((num_rows, row_length), np.dtype(np.int32)) for name in ("segment_ids", "position_ids")}
    expected["sample_index"] = ((num_rows, max_segments), np.dtype(np.int32))
    optional = {name: ((num_rows, row_length), np.dtype(np.float32)) for name in OPTIONAL_STREAMS}
    for micro_batch in batch.micro_batches:
        present = {name: pin for name, pin in optional.items() if getattr(micro_batch, name) is not None}
        for name, pin in (expected | present).items():
            array = getattr(micro_batch, name)
            if (array.shape, array.dtype) != pin:
                raise PackingError(
                    f"packed `{name}` is {array.dtype}{list(array.shape)}, expected {pin[1]}{list(pin[0])}"
                )
    counts = batch.member_counts
    if (counts.shape, counts.dtype) != ((num_counts, len(COMPONENTS)), np.dtype(np.int32)):
        raise PackingError(
            f"`member_counts` is {counts.dtype}{list(counts.shape)}, expected int32[{num_counts}, {len(COMPONENTS)}]"
        )


def _name(sample: TrainingSample, index: int, noun: str = "sample") -> str:
    return f"env {sample.env_name!r}, {noun} {index}"
