"""A real run that learns from demonstrations in one environment and by reward in another."""

import pytest

from tests.e2e.runs import UNMEASURED, metrics, rollouts, run_here, small_run

SHOWN = """[
  {"type": "reasoning_gym", "dataset": "chain_sum", "num_tasks": 300, "name": "played",
   "parameters": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
  {"type": "reasoning_gym", "dataset": "chain_sum", "num_tasks": 300, "name": "shown", "seed": 9000,
   "parameters": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
   "algo": {"type": "sft", "sampling": {"source": "demonstrations"}}}
]"""
MIXED = (f"--orchestrator.train.env={' '.join(SHOWN.split())}", *UNMEASURED, "--run.max_steps=2")


@pytest.mark.slow
def test_demonstrations_train_beside_the_policys_rollouts(tmp_path):
    run_here(small_run(tmp_path / "run", *MIXED))
    rows = metrics(tmp_path / "run")
    for step in (1, 2):
        row, lines = rows[step], rollouts(tmp_path / "run", step)
        played, shown = ([line for line in lines if line["env"] == name] for name in ("played", "shown"))
        assert len(played) + len(shown) == row["ledger/dispatched"] - 32 * (step - 1) == 32
        assert {(line["reward"], line["bucket"], line["error"]) for line in shown} <= {(1.0, "trained", None)}
        assert row["tokens/ce"] == sum(sum(sample["loss_mask"]) for line in shown for sample in line["samples"])
        assert row.get("policy/staleness_steps/max", 0) == 0
    assert rows[1]["tokens/ce"] + rows[2]["tokens/ce"] > 0 and rows[1]["tokens/rl"] + rows[2]["tokens/rl"] > 0
