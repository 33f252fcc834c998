"""What XLA is told in tests; imports nothing, since it must be read before JAX is."""

FAST_COMPILATION = "--xla_backend_optimization_level=1"
"""Tests compile much and compute little: LLVM's costly passes take more time than they save. XLA's own passes stay as they are."""
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
"""Simulated devices of a test's own process; the processes that a test starts have one, unless they say otherwise."""
