"""Speed counts real tokens, and utilisation exists only where the peak is known."""

import pytest

from jaxrl.trainer.throughput import peak_flops_per_s, throughput_metrics
from tests.trainer.tiny import SPEC, make_batch, make_config, make_sample


def test_speed_and_utilisation_count_real_tokens_at_the_mean_length_of_a_sample():
    batch = make_batch([make_sample(0, 12), make_sample(1, 8)], make_config(rows=4))
    assert batch.num_tokens == 20 and len(batch.micro_batches) == 1
    metrics = throughput_metrics(batch, SPEC, train_s=2.0, peak=1e9)
    assert metrics["throughput/train_tokens_per_s"] == 10.0
    assert metrics["pack/real_token_frac"] == 20 / 64
    assert metrics["throughput/mfu_frac"] == pytest.approx(SPEC.flops_per_token(10) * 10.0 / 1e9)
    assert metrics["time/train_s"] == 2.0


def test_without_a_known_peak_there_is_no_utilisation():
    batch = make_batch([make_sample(0, 12)], make_config())
    assert "throughput/mfu_frac" not in throughput_metrics(batch, SPEC, train_s=1.0, peak=None)
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops_per_s("cpu", "bfloat16") is None


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
    ],
)
def test_devices_with_similar_names_keep_their_own_peaks(kind, peak):
    assert peak_flops_per_s(kind, "bfloat16") == peak
