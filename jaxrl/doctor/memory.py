"""The check of memory: what the first device must hold at once, counted before anything is put on it.

Parameters, moments and sums of gradients are counted from the shapes and shardings of the trainer's own state; activations
and logits from the compiler, which says what its program of a gradient step needs beside its arguments.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good, warning


def check_memory(exam: Examination) -> Finding:
    """What the first device holds fits into it; the engine and its weights live there."""
    import jax

    from jaxrl.engine.cache import cache_bytes

    config, programs = exam.config, exam.programs
    spec, engine = programs.model.spec, config.engine
    state = programs.abstract_state
    # The sum of gradients is float32, laid out as the parameters are.
    gradients = sum(4 * _shard_size(leaf) for leaf in jax.tree.leaves(state.params))
    training = sum(leaf.dtype.itemsize * _shard_size(leaf) for leaf in jax.tree.leaves(state)) + gradients
    version = spec.num_params * jax.numpy.dtype(engine.dtype).itemsize
    cache = cache_bytes(spec, engine.num_slots, engine.max_model_len, engine.dtype)
    # A new one is whole before the oldest is forgotten.
    num_versions = config.num_policy_versions + 1
    needed = training + num_versions * version + cache
    counted = f"training {_mib(training)} + {num_versions} policy versions of {_mib(version)} + key-value cache {_mib(cache)}"
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remedy = "lower `inference.num_slots`, use bfloat16, or raise `trainer.mesh.fsdp`"
    if needed > limit:
        return bad(f"{counted} = {_mib(needed)} on the first device, activations not counted; it has {_mib(limit)}: {remedy}")
    step = programs.program("grad_step").memory_analysis()
    if step is not None:
        needed += step.temp_size_in_bytes
        counted += f" + activations and logits of a step {_mib(step.temp_size_in_bytes)}"
    text = f"{counted} = {_mib(needed)} of {_mib(limit)} on the first device"
    if needed > limit:
        return bad(f"{text}: {remedy}, lower `trainer.rows` or `trainer.head_chunk_tokens`, or set `trainer.remat`='layer'")
    free = free_host_bytes(Path("/proc/meminfo"))
    if free is None:
        return good(text)
    text = f"{text}; the host has {_mib(free)} free"
    if device.platform == "cpu" and needed > free:
        return warning(f"{text}, which is less: end other programs first, or {remedy}")
    return good(text)


def free_host_bytes(meminfo: Path) -> int | None:
    """Return the memory that new work on this host can have, from `/proc/meminfo`; None where the system has no such file."""
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _shard_size(leaf: Any) -> int:
    """Return how many elements of an array lie on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
