"""How much memory the process and its devices hold, for the metrics of a step.

In: what the operating system and the devices say of themselves. Out: figures in GiB, `2**30` bytes. What nobody can tell is left out:
the CPU reports no device memory, and 0 would be a lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

GIB = 2**30

_STATUS = Path("/proc/self/status")


class HasMemory(Protocol):
    """A device, as far as its memory goes."""

    def memory_stats(self) -> dict[str, Any] | None:
        """Return counters in bytes by name; None, or an exception, where there are none."""
        ...


def memory_metrics(devices: Iterable[HasMemory]) -> dict[str, float]:
    """Return `memory/host_rss_gib`, `memory/host_peak_gib`, `memory/device_in_use_gib` and `memory/device_peak_gib`.

    The figures of devices are those of the fullest one. The peak of a device is since the process began, so the engine's and the
    trainer's are one.
    """
    return host_memory(_STATUS) | device_memory(devices)


def host_memory(status: Path) -> dict[str, float]:
    """Read the resident memory of a process from a `/proc/<pid>/status` file; nothing where the system has none."""
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    values = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    names = (("VmRSS", "memory/host_rss_gib"), ("VmHWM", "memory/host_peak_gib"))
    return {name: int(values[key][0]) * 1024 / GIB for key, name in names if values.get(key) and values[key][0].isdecimal()}


def device_memory(devices: Iterable[HasMemory]) -> dict[str, float]:
    """Return the fullest device's memory in use and at its peak; nothing for devices that do not count."""
    found: list[dict[str, Any]] = []
    for device in devices:
        # Some backends raise instead of saying that they do not count; a metric is not worth a run.
        try:
            found.append(device.memory_stats() or {})
        except Exception:
            found.append({})
    names = (("bytes_in_use", "memory/device_in_use_gib"), ("peak_bytes_in_use", "memory/device_peak_gib"))
    values = {name: [stats[key] for stats in found if key in stats] for key, name in names}
    return {name: max(counts) / GIB for name, counts in values.items() if counts}
