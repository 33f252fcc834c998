"""Whole runs in this process: what the run folder says, compilations, asynchronous mode, evaluation, publication."""

import jax
import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.trainer.compiles import num_compiles
from tests.e2e.runs import EVALUATED, UNMEASURED, metrics, rollouts, run_here, small_run

BUCKETS = ("trained", "gated", "stale", "overlong_dropped", "unscored", "errored", "cancelled", "filtered/zero_advantage", "pending")


def is_balanced(row: dict[str, float]) -> bool:
    return sum(row[f"ledger/{bucket}"] for bucket in BUCKETS) == row["ledger/dispatched"]


def test_a_synchronous_run_writes_its_folder_and_measures_no_mismatch(tmp_path):
    run_dir = tmp_path / "run"
    outcome = run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=3", "--trainer.checkpoint.every_n_steps=2"))
    rows = metrics(run_dir)

    assert outcome.is_complete
    assert sorted(rows) == [0, 1, 2, 3]
    folder = {"config.toml", "environment.json", "metrics.jsonl", "rollouts", "evals", "checkpoints", "logs"}
    assert {path.name for path in run_dir.iterdir()} == folder
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_000002", "step_000003"}
    assert "eval/chain_sum_heldout/success_rate" in rows[0]
    assert "eval/chain_sum_heldout/success_rate" in rows[3]
    for step in (1, 2, 3):
        assert len(rollouts(run_dir, step)) == 32
        assert is_balanced(rows[step])
        assert 0 <= rows[step]["mismatch/kl/mean"] < 1e-6
        assert rows[step]["mismatch/ratio/max"] < 1 + 1e-4
        assert rows[step]["policy/staleness_steps/max"] == 0
        assert rows[step]["policy/version"] == step


def test_nothing_is_compiled_after_warm_up(tmp_path):
    """Prompts and replies differ in length from step to step, and micro-batches in number; no program may notice."""
    run_dir = tmp_path / "run"
    before = num_compiles()
    jax.jit(lambda x: x + 1)(np.zeros(7, np.float32))
    assert num_compiles() == before + 1, "the counter must see a new shape, or the rest of this test says nothing"

    run_here(small_run(run_dir, *EVALUATED, "--run.max_steps=20", "--trainer.rows=1", "--trainer.head_chunk_tokens=96"))
    rows = metrics(run_dir)
    counts = [rows[step]["compile/count"] for step in range(1, 21)]
    assert counts == [counts[0]] * 20
    assert num_compiles() == counts[0], "evaluation and the last checkpoint compile nothing either"
    assert len({rows[step]["rollout/completion_tokens/mean"] for step in range(1, 21)}) > 10, "lengths did vary"


def test_one_step_ahead_keeps_the_ledger_balanced_and_staleness_within_its_bound(tmp_path):
    run_dir = tmp_path / "run"
    ahead = ("--orchestrator.max_async_level=1", "--orchestrator.max_staleness_steps=1")
    run_here(small_run(run_dir, *UNMEASURED, *ahead, "--run.max_steps=20"))
    rows = metrics(run_dir)
    assert all(is_balanced(rows[step]) for step in range(1, 21))
    assert max(rows[step]["policy/staleness_steps/max"] for step in range(1, 21)) <= 1
    assert any(rows[step]["policy/staleness_steps/mean"] > 0 for step in range(1, 21)), "generation did run ahead"
    assert rows[20]["ledger/pending"] == 0


def test_evaluation_does_not_change_what_is_trained(tmp_path):
    often, never = tmp_path / "often", tmp_path / "never"
    run_here(small_run(often, *EVALUATED, "--run.max_steps=3", "--orchestrator.eval.every_n_steps=1"))
    run_here(small_run(never, *UNMEASURED, "--run.max_steps=3"))
    assert "eval/chain_sum_heldout/success_rate" in metrics(often)[2]
    assert "eval/chain_sum_heldout/success_rate" not in metrics(never)[2]
    for step in (1, 2, 3):
        assert rollouts(often, step) == rollouts(never, step)


def test_a_run_folder_is_never_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run_here(small_run(tmp_path / "run"))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        run_here(small_run(tmp_path / "run"), resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_held_out_questions_that_are_trained_on_are_refused_before_any_device_is_used(tmp_path):
    config = small_run(tmp_path / "run", "--orchestrator.eval.env.0.split=train", "--orchestrator.eval.env.0.seed=7000000")
    with pytest.raises(ConfigError, match="also trained on"):
        run_here(config)
