"""A real run that learns from demonstrations in one environment and by reward in another, and its resume."""

import pytest

from tests.e2e.runs import UNMEASURED, checkpoints_of, metrics, rollouts, run_here, small_run

SHOWN = """[
  {"type": "reasoning_gym", "dataset": "chain_sum", "num_tasks": 300, "name": "played",
   "parameters": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
  {"type": "reasoning_gym", "dataset": "chain_sum", "num_tasks": 300, "name": "shown", "seed": 9000,
   "parameters": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
   "algo": {"type": "sft", "sampling": {"source": "demonstrations"}}}
]"""
MIXED = (f"--orchestrator.train.env={' '.join(SHOWN.split())}", *UNMEASURED, "--run.max_steps=2", "--trainer.checkpoint.every_n_steps=1")


@pytest.mark.slow
def test_demonstrations_train_beside_the_policys_rollouts_and_a_resumed_run_is_the_same_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(small_run(whole, *MIXED))
    run_here(small_run(parts, *MIXED), stop_after=1)
    run_here(small_run(parts, *MIXED), resume=True)
    for step in (1, 2):
        assert rollouts(parts, step) == rollouts(whole, step)
        assert metrics(parts)[step]["loss/total"] == metrics(whole)[step]["loss/total"]
    assert checkpoints_of(parts).latest_complete() == 2
    for step, row in metrics(whole).items():
        assert row["policy/staleness_steps/max"] == 0
        played, shown = ([line for line in rollouts(whole, step) if line["env"] == name] for name in ("played", "shown"))
        assert len(played) + len(shown) == row["ledger/dispatched"] - 32 * (step - 1) == 32
        assert {(line["reward"], line["bucket"], line["error"]) for line in shown} <= {(1.0, "trained", None)}
        tokens = sum(sum(sample["loss_mask"]) for line in shown for sample in line["samples"])
        assert row["tokens/ce"] == tokens
    assert any(row["tokens/ce"] > 0 for row in metrics(whole).values()) and any(row["tokens/rl"] > 0 for row in metrics(whole).values())
