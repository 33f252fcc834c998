"""Packs samples into static-shape micro-batches: the one place where lists of tokens become rectangles.

In: samples of any length, env and mix of streams. Out: a `TrainBatch` whose micro-batches all have the shape `[shards *
rows, row_length]`, with rows balanced over shards and the member counts that the loss divides by. Samples are never
split, reordered inside, or cut silently, and nothing here knows which algorithm stamped a stream.

Legend: N samples, P packed samples (N without the dropped), M micro-batches, R rows of a micro-batch (all shards), T
positions, S segments.

Most of the time goes into memory: making fresh pages and walking lists of arrays. So rows are laid, counted and checked in blocks that
stay in the cache of a core, and nothing passes over a whole stream.

Frozen and demonstration samples hold 0.0 as inference logprob and must have no rl or ref_kl member. A logprob of 0.0 is
also what a live policy gives a token of probability 1, so that rule cannot be checked here: whoever stamps streams
knows the source and keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np

from jaxrl.batching.layout import Layout, plan_rows
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

_STREAMS = (*REQUIRED_STREAMS, *OPTIONAL_STREAMS)
_BLOCK_POSITIONS = 1 << 16
"""Rows are laid in blocks of about so many positions (1.6 MB in the streams of plain rl)."""

Columns = dict[str, Sequence[np.ndarray | None]]
"""Per stream the arrays of all samples, in order. A stream that no sample has is left out."""


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
    columns, lengths = _columns(samples)
    _check_credit(samples, columns)
    packed, columns, lengths, overlong_indices = _fit_to_row(samples, columns, lengths, row_length, overlong)
    grid = plan_rows(lengths, row_length, rows, shards, max_segments, attention_cost)
    layout = Layout.of(grid, lengths, row_length)
    streams, counts, num_loss_tokens = _fill(columns, layout, packed, context_shards)
    batch = TrainBatch(
        step=step,
        micro_batches=_micro_batches(columns, grid, streams, shards * rows, max_segments),
        member_counts=_counts_by_shard(counts, shards, rows),
        num_samples=len(packed),
        num_tokens=sum(lengths),
        num_loss_tokens=num_loss_tokens,
        overlong=overlong_indices,
    )
    _assert_shapes(batch, shards * rows, row_length, max_segments, shards * context_shards)
    return batch


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


def _check_unsampled(sample: TrainingSample, index: int) -> None:
    """Refuse a sample that somebody else than the policy wrote in the components whose importance ratio needs the policy's logprobs."""
    members = sample.members()
    for component, member in (("rl", members.rl), ("ref_kl", members.ref_kl)):
        if member.any():
            raise PackingError(
                f"{_name(sample, index)}: it has {component} members, but the policy did not sample its tokens, so there is no logprob to "
                "compare with; its algorithm must route them to the ce loss"
            )


def _columns(samples: Sequence[TrainingSample]) -> tuple[Columns, list[int]]:
    """Return the samples' arrays by stream, and the samples' lengths; refuse an empty sample, and arrays that disagree in length."""
    columns: Columns = {name: list(map(attrgetter(name), samples)) for name in _STREAMS}
    lengths = [len(sample.token_ids) for sample in samples]
    if 0 in lengths:
        index = lengths.index(0)
        raise PackingError(f"{_name(samples[index], index)}: it has no tokens")
    for name in tuple(columns):
        arrays = columns[name]
        if name in OPTIONAL_STREAMS and all(array is None for array in arrays):
            del columns[name]
            continue
        entries = [length if array is None else len(array) for array, length in zip(arrays, lengths, strict=True)]
        if entries != lengths:
            index = next(i for i, length in enumerate(lengths) if entries[i] != length)
            raise PackingError(
                f"{_name(samples[index], index)}: `{name}` has {entries[index]} entries for {lengths[index]} tokens"
            )
    return columns, lengths


def _check_credit(samples: Sequence[TrainingSample], columns: Columns) -> None:
    """Refuse live rl tokens without advantages, ref_kl members without a reference, and both without the policy's logprobs."""
    for index, sample in enumerate(samples):
        if not sample.has_policy_logprobs:
            _check_unsampled(sample, index)
    for index in _lacking("advantages", columns, len(samples)):
        sample = samples[index]
        weights = sample.rl_weights
        if np.any(sample.loss_mask if weights is None else sample.loss_mask & (weights != 0)):
            raise PackingError(
                f"{_name(sample, index)}: it has live rl tokens but no `advantages`; its algorithm must assign "
                "them (zeros count as assigned) or route the tokens to another component with `rl_weights` 0"
            )
    if "ref_kl_weights" not in columns:
        return
    for index in _lacking("ref_logprobs", columns, len(samples)):
        weights = samples[index].ref_kl_weights
        if weights is not None and np.any(weights):
            raise PackingError(f"{_name(samples[index], index)}: it has ref_kl members but no `ref_logprobs`")


def _lacking(name: str, columns: Columns, num_samples: int) -> Sequence[int]:
    """Return the samples in which an optional stream is absent."""
    if name not in columns:
        return range(num_samples)
    return [index for index, array in enumerate(columns[name]) if array is None]


def _fit_to_row(
    samples: Sequence[TrainingSample], columns: Columns, lengths: list[int], row_length: int, overlong: str
) -> tuple[Sequence[TrainingSample], Columns, list[int], list[int]]:
    """Return what is packed, none of it longer than a row, as samples, columns and lengths, and the indices of samples that were longer."""
    overlong_indices = [index for index, length in enumerate(lengths) if length > row_length]
    if overlong_indices and overlong == "truncate":
        columns = {name: [a if a is None else a[:row_length] for a in arrays] for name, arrays in columns.items()}
        lengths = [min(length, row_length) for length in lengths]
    elif overlong_indices:
        kept = [index for index, length in enumerate(lengths) if length <= row_length]
        samples, lengths = [samples[i] for i in kept], [lengths[i] for i in kept]
        columns = {name: [arrays[i] for i in kept] for name, arrays in columns.items()}
        columns = {name: arrays for name, arrays in columns.items() if any(array is not None for array in arrays)}
    if not lengths:
        raise PackingError(
            f"nothing to pack: {len(samples) + len(overlong_indices)} samples, {len(overlong_indices)} of them dropped as longer than a "
            f"row of {row_length} tokens"
        )
    return samples, columns, lengths, overlong_indices


def _fill(
    columns: Columns, layout: Layout, packed: Sequence[TrainingSample], context_shards: int
) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Lay out the samples' streams with segment and position ids, block by block, and check and count what was laid.

    Returns:
      [rows of all micro-batches, T] arrays by stream; [rows, context_shards, 3] member counts; the number of tokens that are a member.
    """
    num_rows, row_length = layout.num_rows, layout.row_length
    parts = {name: _parts(name, arrays, layout, packed) for name, arrays in columns.items()}
    dtypes = {**{name: _dtype(name) for name in columns}, "segment_ids": np.int32, "position_ids": np.int32}
    streams = {name: np.empty((num_rows, row_length), dtype) for name, dtype in dtypes.items()}
    counts = np.zeros((num_rows, context_shards, len(COMPONENTS)), np.int64)
    num_loss_tokens = 0
    rows_per_block = max(1, _BLOCK_POSITIONS // row_length)
    for first in range(0, num_rows, rows_per_block):
        rows = slice(first, min(first + rows_per_block, num_rows))
        block = {name: stream[rows].reshape(-1) for name, stream in streams.items()}
        for name, arrays in parts.items():
            np.concatenate(arrays[layout.first_parts[rows.start] : layout.first_parts[rows.stop]], out=block[name], casting="same_kind")
        block["segment_ids"][:], block["position_ids"][:] = layout.segments_and_positions(rows)
        is_real = block["segment_ids"] > 0
        rl_weights, ce_weights, ref_kl_weights = map(block.get, ("rl_weights", "ce_weights", "ref_kl_weights"))
        members = component_members(block["loss_mask"], rl_weights, ce_weights, ref_kl_weights, is_real)
        where = _Block(layout, rows, packed)
        _check_first_tokens(members, where)
        _check_values(block, members, is_real, where)
        for component, member in enumerate(members):
            if member.any():
                runs = member.reshape(-1, row_length // context_shards)
                counts[rows, :, component] = np.reshape([np.count_nonzero(run) for run in runs], (-1, context_shards))
        num_loss_tokens += int(np.count_nonzero(members.rl | members.ce | members.ref_kl))
    return streams, counts, num_loss_tokens


def _dtype(name: str) -> type[np.generic]:
    return REQUIRED_STREAMS.get(name, np.float32)


def _parts(name: str, arrays: Sequence[np.ndarray | None], layout: Layout, packed: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Return a stream's array for every part of the layout: the samples' own, the identity where it is absent, padding."""
    dtype = _dtype(name)
    kinds = {(array.dtype, array.ndim) for array in arrays if array is not None}
    bad = {kind for kind in kinds if kind[1] != 1 or not np.can_cast(kind[0], dtype, "same_kind")}
    if bad:
        index, array = next((i, a) for i, a in enumerate(arrays) if a is not None and (a.dtype, a.ndim) in bad)
        raise PackingError(
            f"{_name(packed[index], index, 'packed sample')}: `{name}` must be a one-dimensional {np.dtype(dtype)} array, "
            f"got {array.dtype}{list(array.shape)}"
        )
    identity = np.full(layout.row_length, STREAM_FILL.get(name, 0), dtype)
    laid = [identity[: len(sample)] if array is None else array for array, sample in zip(arrays, packed, strict=True)]
    return layout.in_order(laid, dtype(1 if name == "temperatures" else 0))


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows that are checked together; finds the sample to blame."""

    layout: Layout
    rows: slice
    packed: Sequence[TrainingSample]

    def sample_at(self, position: int) -> str:
        """Say which sample holds a position of the block."""
        index = self.layout.sample_at(self.rows.start * self.layout.row_length + position)
        return _name(self.packed[index], index, "packed sample")


def _check_first_tokens(members: Members, where: _Block) -> None:
    """Invariant: the first token of a segment has no context, so it is never a member."""
    firsts = where.layout.first_positions(where.rows)
    for component, member in zip(COMPONENTS, members, strict=True):
        bad = firsts[member[firsts]]
        if bad.size:
            raise PackingError(
                f"{where.sample_at(bad[0])}: its first token is a {component} member, but has no context to be predicted from"
            )


def _check_values(block: Mapping[str, np.ndarray], members: Members, is_real: np.ndarray, where: _Block) -> None:
    """Refuse a value that the loss would read and that is not finite, and a temperature that cannot divide logits."""

    def refuse(bad: np.ndarray, name: str, place: str) -> None:
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise PackingError(f"{where.sample_at(at)}: `{name}` holds {float(block[name][at])!r} at {place}")

    # A finite sum proves every term finite; a sum that is not (it may only have overflowed) sends the stream to the
    # exact test.
    with np.errstate(all="ignore"):
        suspects = {n for n, s in block.items() if s.dtype == np.float32 and not np.isfinite(np.add.reduce(s))}
    for component, member in zip(COMPONENTS, members, strict=True):
        for name in sorted(suspects.intersection(COMPONENT_READS[component])):
            refuse(member & ~np.isfinite(block[name]), name, f"a {component} member; it must be finite")
    temperatures = block["temperatures"]
    if "temperatures" in suspects or not np.minimum.reduce(temperatures) > 0:
        legal = np.isfinite(temperatures) & (temperatures > 0)
        refuse(is_real & ~legal, "temperatures", "a token; it must be finite and above 0")


def _counts_by_shard(counts: np.ndarray, shards: int, rows: int) -> np.ndarray:
    """Return [shards * context_shards, 3] int32 from the counts of every row, its positions cut into context shards."""
    by_shard = counts.reshape(-1, shards, rows, *counts.shape[1:]).sum((0, 2))
    return by_shard.reshape(-1, len(COMPONENTS)).astype(np.int32)


def _micro_batches(
    columns: Columns, grid: list[list[int]], streams: Mapping[str, np.ndarray], num_rows: int, max_segments: int
) -> list[MicroBatch]:
    """Cut the filled streams into micro-batches, leaving out the streams that none of a micro-batch's samples has."""
    sample_index = np.full((len(grid), max_segments), -1, np.int32)
    for row, items in enumerate(grid):
        sample_index[row, : len(items)] = items
    micro_batches = []
    for start in range(0, len(grid), num_rows):
        own = slice(start, start + num_rows)
        present = {
            name: stream[own]
            for name, stream in streams.items()
            if name not in OPTIONAL_STREAMS or any(columns[name][i] is not None for items in grid[own] for i in items)
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
