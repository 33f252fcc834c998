"""The check of resuming: N steps, a resume and N steps are 2N steps, bit for bit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jaxrl.config.evals import EvalSectionConfig
from jaxrl.config.monitors import MonitorsConfig
from jaxrl.config.run import RunConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, bad, good
from jaxrl.monitors.rollouts import without_times

RESUME_STEPS = 2
"""The check compares this many steps twice with twice as many at once."""


def check_resume(exam: Examination) -> Finding:
    """N steps, a resume and N steps equal 2N steps bit for bit: weights, task order, text, rewards, and what task samplers know."""
    from jaxrl.launch import launch

    config = exam.config
    if config.async_level > 0:
        return bad(f"resume is exact in synchronous runs only; set `orchestrator.max_async_level`=0, got {config.async_level}")
    steps = 2 * RESUME_STEPS
    if config.run.max_steps < steps:
        return bad(f"needs at least {steps} steps; set `run.max_steps`, got {config.run.max_steps}")
    exam.release_arm()
    with tempfile.TemporaryDirectory(prefix="jaxrl-resume-") as folder:
        whole, parts = (_quiet(config, Path(folder) / name) for name in ("whole", "parts"))
        launch(whole, stop_after=steps)
        launch(parts, stop_after=RESUME_STEPS)
        launch(parts, resume=True, stop_after=steps)
        differing = _differences(whole, parts, steps)
    if differing:
        return bad(f"{steps} steps differ from {RESUME_STEPS} + resume + {RESUME_STEPS} in {', '.join(differing)}")
    return good(f"{RESUME_STEPS} + resume + {RESUME_STEPS} steps equal {steps}, bit for bit")


def _quiet(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the same training in another folder, without evaluation, terminal and picture."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"output_dir": str(run_dir)}),
            "orchestrator": config.orchestrator.model_copy(update={"eval": EvalSectionConfig()}),
            "monitors": MonitorsConfig(terminal=False, plot=False),
        }
    )


def _differences(whole: RunConfig, parts: RunConfig, steps: int) -> list[str]:
    """Name what differs between two runs of `steps` steps: rollouts of a step, what the orchestrator knows, arrays of the trainer."""
    import jax
    import numpy as np

    from jaxrl.launch.arrays import ORCHESTRATOR_PART
    from jaxrl.models import build_mesh, load_pretrained
    from jaxrl.trainer.checkpoint import Checkpointer
    from jaxrl.trainer.step import build_programs

    def rollouts(config: RunConfig, step: int) -> list[dict[str, Any]]:
        lines = (config.run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
        return [without_times(json.loads(line)) for line in lines]

    names = [f"the rollouts of step {step}" for step in range(1, steps + 1) if rollouts(whole, step) != rollouts(parts, step)]
    mesh = build_mesh(whole.trainer.mesh)
    model, _ = load_pretrained(whole.orchestrator.model.name, param_dtype=whole.trainer.param_dtype, mesh=mesh)
    abstract = build_programs(model, whole.trainer, mesh, whole.run.max_steps).abstract_state
    saved = [Checkpointer(config.run_dir / "checkpoints", 1, mesh).restore(steps, abstract) for config in (whole, parts)]
    names += differing_memories(*(json.loads(own[ORCHESTRATOR_PART]) for _, own in saved))
    leaves = [jax.tree_util.tree_leaves_with_path(state) for state, _ in saved]
    for (path, ours), (_, theirs) in zip(*leaves, strict=True):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True):
            names.append(jax.tree_util.keystr(path, simple=True, separator="."))
    return names


def differing_memories(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Name what differs between two states of an orchestrator: a task sampler, an algorithm, or what else it keeps.

    Example:
      >>> one, other = ({"source": {"num_draws": 4, "envs": {"sums": {"tasks": {"cursor": n}}}}} for n in (1, 2))
      >>> differing_memories(one, other)
      ["the task sampler of environment 'sums'"]
    """
    envs = (ours["source"]["envs"], theirs["source"]["envs"])
    names = [f"the task sampler of environment {name!r}" for name in envs[0] if envs[0][name] != envs[1].get(name)]
    if ours["source"] != theirs["source"] and not names:
        names.append("the draws")
    return names + [f"the orchestrator's {key}" for key in ours if key != "source" and ours[key] != theirs.get(key)]
