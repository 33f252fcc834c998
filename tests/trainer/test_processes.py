"""Two real processes that share one mesh make the step of one device."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.flags import FAST_COMPILATION
from tests.trainer.mesh_runs import assert_states_close, run_on

ROOT = Path(__file__).parents[2]

# fsdp spans both processes: gathers of weights and sums of gradients cross them, and so do the counts.
CHILD = """
import functools, pickle, sys
import tests.conftest
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
from jax.experimental import multihost_utils
from jaxrl.config.trainer import MeshConfig
from tests.trainer.mesh_runs import step_on
from tests.trainer.tiny import UNTIED, make_config, make_programs, make_state

fetch = functools.partial(multihost_utils.process_allgather, tiled=True)
programs = make_programs(make_config(mesh=MeshConfig(fsdp=4, tensor=2), rows=1), 100, UNTIED)
state, metrics = make_state(programs), []
for step in (1, 2):
    state, found, logprobs = step_on(programs, state, step, fetch)
    metrics.append(found)
with open(path, "wb") as file:
    pickle.dump((fetch(state), metrics, logprobs), file)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_make_the_steps_of_one_device(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [tmp_path / f"{process}.pickle" for process in range(2)]
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(process), str(port), str(path)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for process, path in enumerate(paths)
    ]
    try:
        errors = [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(text[-2000:] for text in errors)
    alone = run_on("untied", "alone")
    for path in paths:
        state, metrics, logprobs = pickle.loads(path.read_bytes())
        assert metrics[1] == pytest.approx(alone.metrics[1], rel=1e-5, abs=1e-6)
        assert_states_close(state, alone.states[1])
        for found, expected in zip(logprobs, alone.logprobs[1], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
