"""How fast the packer is, all in, beside plain copies of the same bytes.

In: a number of samples and the shape of a row. Out: samples, tokens and gigabytes per second of `pack`, from training samples to a
checked train batch, and two ceilings measured in the same rounds: one large copy of as many bytes into fresh memory, which is what a
batch is made of, and into memory that is warm. It times planning alone too, and does not know what the samples are about.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from measure import Case, Figure, Report, interleave

from jaxrl.batching import first_fit_decreasing, pack
from jaxrl.types import MicroBatch, TrainBatch, TrainingSample

ROWS = 8
"""Rows of a micro-batch; the speed depends on rows in all, not on how they are cut."""


def make_samples(num_samples: int, min_length: int, max_length: int) -> list[TrainingSample]:
    """Plain GRPO samples of uniform lengths: a quarter prompt, then sampled tokens with one advantage each."""
    rng = np.random.default_rng(0)
    samples = []
    for length in rng.integers(min_length, max_length + 1, num_samples).tolist():
        loss_mask = np.arange(length) >= max(1, length // 4)
        samples.append(
            TrainingSample(
                token_ids=rng.integers(0, 50_000, length, dtype=np.int32),
                loss_mask=loss_mask,
                inference_logprobs=np.where(loss_mask, -rng.random(length, dtype=np.float32), np.float32(0)),
                temperatures=np.ones(length, np.float32),
                env_name="benchmark",
                advantages=np.where(loss_mask, np.float32(0.5), np.float32(0)),
            )
        )
    return samples


def num_bytes(batch: TrainBatch) -> int:
    """Bytes of all arrays of a batch."""
    arrays = (getattr(m, name) for m in batch.micro_batches for name in MicroBatch.__struct_fields__)
    return sum(array.nbytes for array in arrays if array is not None)


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="Time the packer beside plain copies of the same bytes.")
    parser.add_argument("--samples", type=int, default=10_000, help="samples of the batch")
    parser.add_argument("--min-length", type=int, default=50, help="tokens of the shortest sample")
    parser.add_argument("--max-length", type=int, default=4000, help="tokens of the longest sample")
    parser.add_argument("--row-length", type=int, default=8192, help="positions of a row")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; every case runs once per round")
    parser.add_argument("--output", type=Path, help="JSON file; benchmarks/results/packing.json by default")
    args = parser.parse_args()

    samples = make_samples(args.samples, args.min_length, args.max_length)
    lengths = [len(sample) for sample in samples]

    def run() -> TrainBatch:
        return pack(samples, row_length=args.row_length, rows=ROWS, shards=1)

    batch = run()
    size, rows = num_bytes(batch), len(batch.micro_batches) * ROWS
    real_rows = sum(int((m.sample_index[:, 0] >= 0).sum()) for m in batch.micro_batches)
    del batch
    source = np.ones(size, np.uint8)
    warm = np.ones_like(source)
    gigabytes = size / 1e9
    cases = [
        Case("pack", run, args.samples, "samples"),
        Case("plan alone", lambda: first_fit_decreasing(lengths, args.row_length, 32), args.samples, "samples"),
        Case("copy into fresh memory", source.copy, gigabytes, "GB"),
        Case("copy into warm memory", lambda: np.copyto(warm, source), gigabytes, "GB"),
    ]
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    report = Report("packing", settings=settings, packages=("numpy",))
    report.figures = interleave(cases, repeats=args.rounds)
    pack_s = report.figures["pack"].seconds
    for name, work, unit in (("pack, tokens", sum(lengths), "tokens"), ("pack, bytes written", gigabytes, "GB")):
        report.figures[name] = Figure(name, unit, [work / seconds for seconds in pack_s], pack_s)
    report.ratio("pack over a copy into fresh memory", "pack, bytes written", "copy into fresh memory")
    report.ratio("pack over a copy into warm memory", "pack, bytes written", "copy into warm memory")
    report.notes.append(
        f"{sum(lengths):,} tokens in {real_rows} rows of {args.row_length} (least possible {-(-sum(lengths) // args.row_length)}), "
        f"fill {sum(lengths) / (real_rows * args.row_length):.4f}; {rows} rows with dummies, {gigabytes:.3f} GB"
    )
    report.publish(args.output)


if __name__ == "__main__":
    main()
