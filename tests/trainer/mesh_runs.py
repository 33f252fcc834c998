"""A few steps of a tiny model on any mesh, the same samples everywhere: what the tests of meshes, collectives and processes compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.trainer.loop import split_by_sample
from jaxrl.trainer.step import StepPrograms, densify
from jaxrl.types import MicroBatch
from tests.trainer.tiny import ALONE, MESHES, SPEC, UNTIED, make_batch, make_config, make_programs, make_sample, make_state, to_host

STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
SPECS = {"tied": SPEC, "untied": UNTIED}
NUM_STEPS = 3


class Run(NamedTuple):
    """What came out of a few steps on one mesh, in numpy."""

    states: list[Any]
    metrics: list[dict[str, float]]
    logprobs: list[list[np.ndarray]]
    """Per step and sample, under the weights before the step."""


def programs_of(spec: str, mesh: str) -> StepPrograms:
    config = ALONE if mesh == "alone" else MESHES[mesh]
    return make_programs(make_config(mesh=config, rows=1 if config.row_shards > 1 else 2), 100, SPECS[spec])


def samples_of(step: int) -> list[Any]:
    """Samples of 3 to 16 tokens; every other one carries all streams. They fill more rows than a micro-batch has anywhere."""
    lengths = (16, 15, 14, 13, 12, 12, 11, 11, 10, 10, 9, 7, 6, 5, 4, 3)
    return [make_sample(100 * step + i, length, streams=STREAMS if i % 2 else STREAMS[:1]) for i, length in enumerate(lengths)]


def poisoned(micro_batch: MicroBatch) -> dict[str, np.ndarray]:
    """The arrays of a micro-batch with NaN in every float of its padding."""
    arrays = densify(micro_batch)
    padding = arrays["segment_ids"] == 0
    return {name: np.where(padding, np.float32(np.nan), array) if array.dtype == np.float32 else array for name, array in arrays.items()}


def step_on(
    programs: StepPrograms, state: Any, step: int, fetch: Callable[[Any], Any] = jax.device_get
) -> tuple[Any, dict[str, float], list[np.ndarray]]:
    """Make one step of several micro-batches."""
    batch = make_batch(samples_of(step), programs.config, step)
    assert len(batch.micro_batches) >= 2
    denominators = programs.psum_denominators(batch.member_counts)
    accumulator, logprobs = programs.zero_accumulator(), []
    for micro_batch in batch.micro_batches:
        accumulator, logprobs_BT = programs.grad_step(state, accumulator, poisoned(micro_batch), denominators)
        logprobs.append(fetch(logprobs_BT))
    state, metrics = programs.apply(state, accumulator)
    return state, {name: float(value) for name, value in metrics.items()}, split_by_sample(batch, logprobs)


@functools.cache
def run_on(spec: str, mesh: str) -> Run:
    programs = programs_of(spec, mesh)
    state, run = make_state(programs), Run([], [], [])
    for step in range(1, NUM_STEPS + 1):
        state, metrics, logprobs = step_on(programs, state, step)
        for found, value in zip(run, (to_host(state), metrics, logprobs), strict=True):
            found.append(value)
    return run


def assert_states_close(found: Any, expected: Any) -> None:
    """Equal but for the order in which float32 sums were taken.

    An element of the gradient is a sum over some 100 tokens: two orders differ by up to 100 * 2^-24 = 6e-6 of its largest
    terms, and 1e-6 of the largest element of an array was seen. The optimizer's eps of 1e-3 is above the elements of the
    clipped gradient, so an update is no sign, which would turn rounding noise into whole steps.
    """

    def assert_close(x: np.ndarray, y: np.ndarray) -> None:
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())

    jax.tree.map(assert_close, found.opt_state, expected.opt_state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), found.params, expected.params)
    counters = [(int(state.step), int(state.num_skipped), int(state.num_empty)) for state in (found, expected)]
    assert counters[0] == counters[1]
