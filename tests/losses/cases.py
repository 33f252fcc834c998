"""The golden cases of the loss as dense arrays, and random micro-batches with members in every component.

`golden/losses/loss_cases.json` comes from a float64 implementation written apart from this package.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxrl.config.trainer import DefaultLossConfig, IPOLossConfig, LossConfig
from jaxrl.types import STREAM_FILL

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "losses" / "loss_cases.json").read_text())
LENGTH = 12
"""Every case is padded to one row of this length, so that a jitted loss compiles once per configuration."""
STREAMS = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")

Arrays = dict[str, np.ndarray]


def loss_config(case: Mapping) -> LossConfig:
    config = case["config"]
    scales = {"adv_tau": config["adv_tau"], "kl_tau": config["kl_tau"]}
    if config["kind"] == "ipo":
        return IPOLossConfig(ipo_threshold=config["ipo_threshold"], **scales)
    return DefaultLossConfig(dppo_mask_low=config["mask_low"], dppo_mask_high=config["mask_high"], **scales)


def pack_row(sequences: list[Mapping], dtype: type = np.float64, length: int = LENGTH) -> Arrays:
    """Lay sequences one after another in a single padded row."""
    row = {name: np.zeros((1, length), dtype) for name in STREAMS}
    row |= {"loss_mask": np.zeros((1, length), bool), "segment_ids": np.zeros((1, length), np.int32)}
    start = 0
    for segment, sequence in enumerate(sequences, start=1):
        end = start + len(sequence["trainer_logprobs"])
        for name in (*STREAMS, "loss_mask"):
            values = sequence[name]
            row[name][0, start:end] = STREAM_FILL[name] if values is None else values
        row["segment_ids"][0, start:end] = segment
        start = end
    return row


def micro_batches(case: Mapping, dtype: type = np.float64) -> tuple[list[Arrays], list[np.ndarray]]:
    """All micro-batches of a case's step, of all its ranks, and the expected gradient of each."""
    batches, gradients = [], []
    for rank, expected in zip(case["inputs"]["step"], case["expected"]["grad"], strict=True):
        for sequences, gradient in zip(rank, expected, strict=True):
            batches.append(pack_row(sequences, dtype))
            flat = np.concatenate([np.asarray(tokens, np.float64) for tokens in gradient])
            gradients.append(np.pad(flat, (0, LENGTH - len(flat)))[None])
    return batches, gradients


def random_arrays(seed: int, rows: int = 8, length: int = 16, dtype: type = np.float32) -> Arrays:
    """Micro-batch of random samples, padding and streams: every kind of token is in it, all values are finite."""
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    arrays = {
        name: -rng.exponential(1.0, shape) for name in ("trainer_logprobs", "trainer_logprobs_raw", "inference_logprobs", "ref_logprobs")
    }
    arrays["advantages"] = rng.normal(size=shape)
    arrays |= {name: rng.choice([0.0, 0.0, 1.0, 0.5, -0.3], shape) for name in ("rl_weights", "ce_weights", "ref_kl_weights")}
    arrays["entropy"] = rng.exponential(1.0, shape)
    arrays = {name: values.astype(dtype) for name, values in arrays.items()}
    num_real = rng.integers(length // 2, length + 1, (rows, 1))
    starts = rng.random(shape) < 0.25
    segments = 1 + np.cumsum(np.where(np.arange(length)[None] == 0, False, starts), axis=1)
    arrays["segment_ids"] = np.where(np.arange(length)[None] < num_real, segments, 0).astype(np.int32)
    arrays["loss_mask"] = rng.random(shape) < 0.6
    return arrays


def without_context(segment_ids: np.ndarray) -> np.ndarray:
    """Padding and the first token of every segment, by a plain loop."""
    lacks = np.ones(segment_ids.shape, bool)
    for row, ids in enumerate(segment_ids):
        for t in range(1, len(ids)):
            lacks[row, t] = ids[t] == 0 or ids[t] != ids[t - 1]
    return lacks
