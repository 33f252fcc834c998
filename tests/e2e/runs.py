"""Small real runs for the end-to-end tests: the shipped start model on a small share of the quickstart's work."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.config.trainer import MeshConfig
from jaxrl.launch import Outcome, launch
from jaxrl.models import build_mesh
from jaxrl.monitors.rollouts import without_times
from jaxrl.trainer.checkpoint import Checkpointer
from tests.flags import FAST_COMPILATION

ROOT = Path(__file__).parents[2]
CACHES = tempfile.TemporaryDirectory(prefix="jaxrl-caches-")
SMALL = (
    f"--orchestrator.model.name={ROOT}/configs/quickstart/start_model",
    "--orchestrator.batch_size=32",
    "--orchestrator.train.env.0.num_tasks=300",
    "--inference.num_slots=32",
    "--inference.prefill_rows=8",
    "--inference.min_prefill_bucket=32",
    "--trainer.rows=4",
    "--trainer.head_chunk_tokens=384",
    "--monitors.plot=false",
    "--monitors.terminal=false",
)


EVALUATED = ("--orchestrator.eval.num_tasks=8", "--orchestrator.eval.env.0.num_tasks=200")
UNMEASURED = ("--orchestrator.eval.env=[]",)


def small_arguments(run_dir: Path, *overrides: str) -> list[str]:
    """Return the command line of a small run in `run_dir`."""
    return ["--config", str(ROOT / "configs/quickstart.toml"), *SMALL, f"--run.output_dir={run_dir}", *overrides]


def small_run(run_dir: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a small run in `run_dir`."""
    return load_config(ROOT / "configs/quickstart.toml", [*SMALL, f"--run.output_dir={run_dir}", *overrides])


def run_here(config: RunConfig, **settings: Any) -> Outcome:
    """Train in this process, on one of its simulated devices."""
    return launch(config, devices=jax.devices()[:1], **settings)


def checkpoints_of(run_dir: Path) -> Checkpointer:
    """Return the checkpoints of a run."""
    return Checkpointer(run_dir / "checkpoints", 2, build_mesh(MeshConfig(), jax.devices()[:1]))


def train_in_child(arguments: list[str]) -> subprocess.Popen[str]:
    """Start `python -m jaxrl.train` on one CPU device, as a user would, with a compile cache of this test session's own."""
    command = [sys.executable, "-m", "jaxrl.train", *arguments]
    env = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": CACHES.name}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the rows of metrics.jsonl, merged by step."""
    rows: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return rows


def rollouts(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the rollouts of a step without what a clock said of them."""
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]
