"""How fast a step went, against what the device could do.

In: times, token counts and the name of a device. Out: metrics. A peak is stated only for devices and precisions that we
know; without it there is no utilisation metric, rather than a made-up one. It measures nothing itself.
"""

from __future__ import annotations

from jaxrl.models import ModelSpec
from jaxrl.types import TrainBatch

BFLOAT16_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("GB300", 2.5e15),
    ("B200", 2.25e15),
    ("B300", 2.25e15),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
)
"""Dense bfloat16 peak in FLOP/s of one device, by a part of its `device_kind`; the first match counts."""


def peak_flops_per_s(device_kind: str, compute_dtype: str) -> float | None:
    """Return the peak of one device, or None if it is not known.

    Args:
      device_kind: `jax.Device.device_kind`.
      compute_dtype: precision of the matrix products; only `bfloat16` has listed peaks.

    Example:
      >>> peak_flops_per_s("NVIDIA H200", "bfloat16"), peak_flops_per_s("cpu", "bfloat16")
      (989000000000000.0, None)
    """
    if compute_dtype != "bfloat16":
        return None
    return next((peak for part, peak in BFLOAT16_PEAKS if part in device_kind), None)


def throughput_metrics(batch: TrainBatch, spec: ModelSpec, train_s: float, peak: float | None) -> dict[str, float]:
    """Return the speed and packing metrics of one step.

    Args:
      batch: what was trained on.
      spec: the model, for its cost per token.
      train_s: seconds from the first count to the finished update.
      peak: FLOP/s of all the trainer's devices together, or None.

    Returns:
      `time/train_s`; `throughput/train_tokens_per_s` and `throughput/mfu_frac` (if there is a peak) of real tokens
      only, each costed at the mean length of a sample; and `pack/real_token_frac`, the part of the positions that held
      real tokens.
    """
    num_positions = sum(micro_batch.token_ids.size for micro_batch in batch.micro_batches)
    tokens_per_s = batch.num_tokens / train_s
    metrics = {
        "time/train_s": train_s,
        "throughput/train_tokens_per_s": tokens_per_s,
        "pack/real_token_frac": batch.num_tokens / num_positions,
    }
    if peak is not None:
        mean_length = round(batch.num_tokens / max(batch.num_samples, 1))
        metrics["throughput/mfu_frac"] = spec.flops_per_token(mean_length) * tokens_per_s / peak
    return metrics
