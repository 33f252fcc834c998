"""Packs samples into static-shape micro-batches: the one place where lists of tokens become rectangles.

In: samples of any length, env and mix of streams. Out: a `TrainBatch` whose micro-batches all have the shape `[shards *
rows, row_length]`, with rows balanced over shards and the member counts that the loss divides by. Samples are never
split, reordered inside, or cut silently, and nothing here knows which algorithm stamped a stream.

Legend: N samples, P packed samples (N without the dropped), M micro-batches, R rows of a micro-batch (all shards), T
positions, S segments.

Most of the time goes into memory: fresh pages have to be made, and lists of arrays have to be walked. A large batch therefore has a
second thread, which makes pages and checks whole streams while the first one plans and copies. What it computes does not depend on
that thread.

Frozen and demonstration samples hold 0.0 as inference logprob and must have no rl or ref_kl member. A logprob of 0.0 is
also what a live policy gives a token of probability 1, so that rule cannot be checked here: whoever stamps streams
knows the source and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any, Literal

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
_THREAD_FROM_TOKENS = 1_000_000
"""Batches of fewer tokens are packed in one thread: there is too little to share."""
_LAY_SAMPLES = 64
"""Samples whose streams are copied in turn: arrays of one sample tend to be neighbours in memory."""
_PAGE_BYTES = 4096

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
    num_tokens, num_rows = sum(lengths), shards * rows
    least = -(-num_tokens // (num_rows * row_length)) * num_rows * row_length
    with ThreadPoolExecutor(1, "pack") if num_tokens >= _THREAD_FROM_TOKENS else _InPlace() as beside:
        canvas = _Canvas(columns, least, beside)
        grid = plan_rows(lengths, row_length, rows, shards, max_segments, attention_cost)
        layout = Layout.of(grid, lengths, row_length)
        streams = {name: canvas.take(name, layout.num_positions) for name in ("segment_ids", "position_ids")}
        layout.write_segments_and_positions(*streams.values())
        is_real = beside.submit(np.greater, streams["segment_ids"], 0)
        streams |= _lay(canvas, columns, layout, packed)
        members = beside.submit(_members, streams, is_real)
        suspects = _suspects(streams)
        _check_first_tokens(members.result(), layout, packed)
        _check_values(streams, suspects, members.result(), layout, packed)
    streams = {name: stream.reshape(-1, row_length) for name, stream in streams.items()}
    batch = TrainBatch(
        step=step,
        micro_batches=_micro_batches(columns, grid, streams, num_rows, max_segments),
        member_counts=_count_members(members.result(), shards, rows, context_shards, row_length),
        num_samples=len(packed),
        num_tokens=num_tokens,
        num_loss_tokens=_count_loss_tokens(members.result()),
        overlong=overlong_indices,
    )
    _assert_shapes(batch, num_rows, row_length, max_segments, shards * context_shards)
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


def _columns(samples: Sequence[TrainingSample]) -> tuple[Columns, list[int]]:
    """Return the samples' arrays by stream, and the samples' lengths; refuse an empty sample, and arrays that disagree in length."""
    columns: Columns = {name: list(map(attrgetter(name), samples)) for name in _STREAMS}
    lengths = list(map(len, columns["token_ids"]))
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
    """Refuse live rl tokens without advantages and ref_kl members without a reference."""
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


class _InPlace(Executor):
    """Runs what is submitted at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Canvas:
    """Flat arrays of zeros, one per stream, whose memory pages another thread makes while rows are being planned."""

    def __init__(self, columns: Columns, least_positions: int, beside: Executor) -> None:
        """`least_positions` is what any plan needs."""
        self._arrays = {
            name: beside.submit(_resident_zeros, least_positions, _dtype(name)) for name in ("segment_ids", "position_ids", *columns)
        }

    def take(self, name: str, num_positions: int) -> np.ndarray:
        """Return a stream's [num_positions] zeros; called once per stream."""
        array = self._arrays.pop(name).result()
        return array[:num_positions] if num_positions <= array.size else np.zeros(num_positions, array.dtype)


def _resident_zeros(num_positions: int, dtype: type[np.generic]) -> np.ndarray:
    """Return at least `num_positions` zeros, of which so many are in memory.

    A plan seldom needs more than an eighth above its lower bound. Memory that nobody touches is only an address.
    """
    array = np.zeros(num_positions + num_positions // 8, dtype)
    array[: num_positions : _PAGE_BYTES // array.itemsize] = 0
    return array


def _dtype(name: str) -> type[np.generic]:
    return np.int32 if name in ("segment_ids", "position_ids") else REQUIRED_STREAMS.get(name, np.float32)


def _lay(canvas: _Canvas, columns: Columns, layout: Layout, packed: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    """Return streams as [positions]: each sample's array in its place, the identity where it is absent, padding elsewhere."""
    for name, arrays in columns.items():
        _check_dtypes(name, arrays, packed)
    streams = {name: canvas.take(name, layout.num_positions) for name in columns}
    for place in layout.paddings:
        streams["temperatures"][place] = 1
    starts = layout.sample_starts.tolist()
    ends = [start + len(ids) for start, ids in zip(starts, columns["token_ids"], strict=True)]
    for start in range(0, len(starts), _LAY_SAMPLES):
        own = slice(start, start + _LAY_SAMPLES)
        places = list(map(slice, starts[own], ends[own]))
        for name, stream in streams.items():
            for place, array in zip(places, columns[name][own], strict=True):
                stream[place] = STREAM_FILL[name] if array is None else array
    return streams


def _check_dtypes(name: str, arrays: Sequence[np.ndarray | None], packed: Sequence[TrainingSample]) -> None:
    """Refuse arrays that are not one-dimensional or whose values a stream's dtype cannot hold."""
    dtype = _dtype(name)
    kinds = {(array.dtype, array.ndim) for array in arrays if array is not None}
    bad = [kind for kind in kinds if kind[1] != 1 or not np.can_cast(kind[0], dtype, "same_kind")]
    if bad:
        index = next(i for i, array in enumerate(arrays) if array is not None and (array.dtype, array.ndim) in bad)
        array = arrays[index]
        assert array is not None
        raise PackingError(
            f"{_name(packed[index], index, 'packed sample')}: `{name}` must be a one-dimensional {np.dtype(dtype)} array, "
            f"got {array.dtype}{list(array.shape)}"
        )


def _members(streams: Mapping[str, np.ndarray], is_real: Future[np.ndarray]) -> Members:
    """Return [positions] membership of every token."""
    weights = (streams.get(name) for name in ("rl_weights", "ce_weights", "ref_kl_weights"))
    return component_members(streams["loss_mask"], *weights, is_real.result())


def _suspects(streams: Mapping[str, np.ndarray]) -> set[str]:
    """Return the streams that may hold a value that is not finite, and `temperatures` if one may not be above 0.

    A finite sum proves every term finite; a sum that is not may only have overflowed.
    """
    with np.errstate(all="ignore"):
        suspects = {n for n, s in streams.items() if s.dtype == np.float32 and not np.isfinite(s.sum())}
    return suspects if streams["temperatures"].min() > 0 else suspects | {"temperatures"}


def _check_first_tokens(members: Members, layout: Layout, packed: Sequence[TrainingSample]) -> None:
    """Invariant: the first token of a segment has no context, so it is never a member."""
    for component, member in zip(COMPONENTS, members, strict=True):
        bad = member[layout.sample_starts]
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            raise PackingError(
                f"{_name(packed[index], index, 'packed sample')}: its first token is a {component} member, but has no "
                "context to be predicted from"
            )


def _check_values(
    streams: Mapping[str, np.ndarray], suspects: set[str], members: Members, layout: Layout, packed: Sequence[TrainingSample]
) -> None:
    """Refuse a value that the loss would read and that is not finite, and a temperature that cannot divide logits."""

    def refuse(bad: np.ndarray, name: str, where: str) -> None:
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            index = layout.sample_at(at)
            value = float(streams[name][at])
            raise PackingError(f"{_name(packed[index], index, 'packed sample')}: `{name}` holds {value!r} at {where}")

    for component, member in zip(COMPONENTS, members, strict=True):
        for name in sorted(suspects.intersection(COMPONENT_READS[component])):
            refuse(member & ~np.isfinite(streams[name]), name, f"a {component} member; it must be finite")
    if "temperatures" in suspects:
        temperatures = streams["temperatures"]
        legal = np.isfinite(temperatures) & (temperatures > 0)
        refuse((streams["segment_ids"] > 0) & ~legal, "temperatures", "a token; it must be finite and above 0")


def _count_members(members: Members, shards: int, rows: int, context_shards: int, row_length: int) -> np.ndarray:
    """Return [shards * context_shards, 3] int32: members in each shard's own slice of rows and positions."""
    run = rows * row_length if context_shards == 1 else row_length // context_shards
    runs = np.array([[np.count_nonzero(part) for part in member.reshape(-1, run)] for member in members])
    return runs.reshape(len(COMPONENTS), -1, shards, rows * row_length // context_shards // run, context_shards).sum((1, 3)).reshape(len(COMPONENTS), -1).T.astype(np.int32)


def _count_loss_tokens(members: Members) -> int:
    return int(np.count_nonzero(members.rl | members.ce | members.ref_kl))


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
