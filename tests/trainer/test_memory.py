"""`jaxrl.trainer.memory`: figures of the host and of the fullest device, and none where nobody counts."""

from pathlib import Path

import jax

from jaxrl.trainer.memory import device_memory, host_memory, memory_metrics

GIB = 2**30


class Device:
    """A device with given counters."""

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


class Uncounted:
    """A device that raises instead of saying that it does not count."""

    def memory_stats(self) -> None:
        raise NotImplementedError


def test_the_host_s_figures_come_from_its_status(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nVmHWM:\t {3 * 2**20} kB\nVmRSS:\t {2**19} kB\n")
    assert host_memory(tmp_path / "status") == {"memory/host_rss_gib": 0.5, "memory/host_peak_gib": 3.0}
    assert host_memory(tmp_path / "none") == {}
    (tmp_path / "odd").write_text("VmRSS:\nVmHWM: unknown kB\nVmSize\n")
    assert host_memory(tmp_path / "odd") == {}


def test_of_several_devices_the_fullest_counts() -> None:
    devices = [Device({"bytes_in_use": GIB, "peak_bytes_in_use": 4 * GIB}), Device({"bytes_in_use": 2 * GIB, "peak_bytes_in_use": 3 * GIB})]
    assert device_memory(devices) == {"memory/device_in_use_gib": 2.0, "memory/device_peak_gib": 4.0}
    assert device_memory([Device({"bytes_in_use": GIB})]) == {"memory/device_in_use_gib": 1.0}


def test_a_device_that_does_not_count_has_no_figure_rather_than_zero() -> None:
    assert device_memory([Device(None), Uncounted()]) == {}
    names = memory_metrics(jax.local_devices()).keys()
    assert names <= {"memory/host_rss_gib", "memory/host_peak_gib"}, "simulated devices of the CPU count nothing"
