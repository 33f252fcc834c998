"""Synchronous runs resume exactly: 3 steps, SIGKILL, resume and 3 more equal 6 steps at once, bit for bit.

Every part is a process of its own, started from the command line: the number of simulated devices changes how XLA splits a
sum, so bits may be compared between equal processes only.
"""

import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.models import build_mesh, load_pretrained
from jaxrl.trainer.step import build_programs
from tests.e2e.runs import UNMEASURED, checkpoints_of, metrics, rollouts, small_arguments, small_run, train_in_child

STEPS = (*UNMEASURED, "--run.max_steps=6", "--trainer.checkpoint.every_n_steps=3")
DEADLINE_S = 110.0


def final_state(run_dir: Path) -> list[np.ndarray]:
    """Return every array of the state that the checkpoint of step 6 holds."""
    config = small_run(run_dir, *STEPS)
    mesh = build_mesh(config.trainer.mesh, jax.devices()[:1])
    model, _ = load_pretrained(config.orchestrator.model.name, mesh=mesh)
    abstract = build_programs(model, config.trainer, mesh, config.run.max_steps).abstract_state
    state, _ = checkpoints_of(run_dir).restore(6, abstract)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def kill_when(arguments: list[str], is_time) -> None:
    """Run training in a child process and kill it, without warning, as soon as `is_time()`."""
    child = train_in_child(arguments)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not is_time():
            assert child.poll() is None, f"training ended before it could be killed:\n{child.stdout.read()}"
            assert time.monotonic() < deadline, "training did not come far enough to be killed"
            time.sleep(0.002)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def finish(arguments: list[str]) -> str:
    """Run training in a child process to its end and return what it said."""
    child = train_in_child(arguments)
    try:
        output, _ = child.communicate(timeout=DEADLINE_S)
    finally:
        child.kill()
    assert child.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Six steps without a break."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(small_arguments(run_dir, *STEPS))
    return run_dir


@pytest.mark.parametrize("moment", ["after_a_save", "during_a_save"])
def test_a_killed_run_resumes_bit_for_bit(whole, tmp_path, moment):
    run_dir = tmp_path / "run"
    saved = run_dir / "checkpoints" / "step_000003"

    def is_time() -> bool:
        if moment == "after_a_save":
            return saved.exists() and len(metrics(run_dir)) >= 4
        # The second save is under way: its directory exists under its temporary name only.
        return any("step_000006" in path.name and path.name != "step_000006" for path in saved.parent.glob("step_*"))

    kill_when(small_arguments(run_dir, *STEPS), is_time)
    assert checkpoints_of(run_dir).latest_complete() == 3

    finish(["--resume", str(run_dir)])

    assert checkpoints_of(run_dir).latest_complete() == 6
    assert sorted(metrics(run_dir)) == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        assert rollouts(run_dir, step) == rollouts(whole, step), f"task order, text or rewards of step {step} differ"
    for ours, theirs in zip(final_state(run_dir), final_state(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    run_dir = tmp_path / "run"
    child = train_in_child(small_arguments(run_dir, *UNMEASURED, "--run.max_steps=500"))
    deadline = time.monotonic() + DEADLINE_S
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
        assert child.poll() is None, child.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=60)

    assert child.returncode == 0, output
    assert f"--resume {run_dir}" in output.replace("\n", "")
    assert checkpoints_of(run_dir).latest_complete() == max(metrics(run_dir))


def test_ctrl_c_before_the_first_step_ends_in_order_and_promises_no_resume(tmp_path):
    long_eval = ("--orchestrator.eval.num_tasks=2000", "--orchestrator.eval.env.0.num_tasks=30_000", "--monitors.terminal=true")
    child = train_in_child(small_arguments(tmp_path / "run", *long_eval))
    for line in child.stdout:
        if line.startswith("evaluating"):
            break
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0, output
    assert "nothing was trained or saved" in output
    assert "Traceback" not in output
    assert "--resume" not in output
