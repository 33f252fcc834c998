"""The curriculum against uniform draws: what is kept of a run, how seeds are paired and read, and that the arms differ in draws alone."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.config.load import load_config

PATH = Path(__file__).parents[2] / "benchmarks" / "curriculum.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_curriculum", PATH)
assert SPEC is not None and SPEC.loader is not None
curriculum = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = curriculum
SPEC.loader.exec_module(curriculum)


def write_run(runs: Path, arm: str, seed: int, *, num_steps: int = 4, gain: float = 0.1, tokens: int = 100) -> Path:
    """Write what a run leaves behind: two groups of two a step, the easy one split in every other step, and success that grows."""
    folder = runs / f"{arm}-{seed}"
    (folder / "rollouts").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {f"tasks/sums/{name}": value * step for name, value in {"groups": 2, "episodes": 4, "cost": tokens}.items()}
            row["tasks/sums/signal_groups"] = (step + 1) // 2
        if step % 2 == 0:
            scores = {"easy": 0.5 + gain * step, "hard": 0.1}
            row |= {f"eval/sums_heldout/by_difficulty/{tier}/success_rate": score for tier, score in scores.items()}
            row["eval/sums_heldout/success_rate"] = 0.9
        rows.append(row)
        rollouts = [
            {"task": {"difficulty": tier}, "group_id": f"sums/{step}/{tier}", "reward": reward}
            for tier, rewards in (("easy", [1.0, float(step % 2 == 0)]), ("hard", [0.0, None]))
            for reward in rewards
        ]
        if step:
            path = folder / "rollouts" / f"step_{step:06d}.jsonl"
            path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps({"commit": "abcdef0123", "is_modified": False, "num_cpus": 2}))
    about = {"seed": seed, "wall_s": 77, "load_before": 0.5, "load_after": 2.0}
    (folder / "benchmark.json").write_text(json.dumps(about))
    return folder


def test_a_run_is_kept_as_its_evaluations_its_totals_and_what_it_played_of_each_tier(tmp_path: Path) -> None:
    kept = curriculum.collect("uniform", write_run(tmp_path, "uniform", 3))
    first, second, third = kept["points"]
    assert (first["episodes"], first["tokens"]) == (0.0, 0.0) and (third["episodes"], third["tokens"]) == (16, 400)
    assert first["success"] == pytest.approx(0.3) and second["success_by_tier"] == {"easy": 0.7, "hard": 0.1}
    assert kept["steps"][-1] == {"step": 4, "groups": 8, "signal_groups": 2, "episodes": 16, "tokens": 400}
    assert kept["tiers"]["easy"] == {"episodes": [2] * 4, "groups": [1] * 4, "signal_groups": [1, 0, 1, 0]}
    assert kept["tiers"]["hard"]["signal_groups"] == [0] * 4, "a reward that is missing is no other reward"
    assert (kept["arm"], kept["seed"], kept["wall_s"], kept["commit"]) == ("uniform", 3, 77, "abcdef0123")


def test_curves_are_compared_where_all_of_them_are_and_seed_by_seed(tmp_path: Path) -> None:
    for seed, gains in enumerate(((0.05, 0.1), (0.05, 0.2), (0.0, 0.1))):
        for arm, gain, tokens in zip(curriculum.ARMS, gains, (100, 200), strict=True):
            write_run(tmp_path, arm, seed, gain=gain, tokens=tokens)
    write_run(tmp_path, "uniform", 3)
    runs = [curriculum.collect(path.name.partition("-")[0], path) for path in sorted(tmp_path.iterdir())]
    pairs = curriculum.paired(runs)
    assert [pair["uniform"]["seed"] for pair in pairs] == [0, 1, 2], "a seed of one arm alone is no pair"
    grid, curves = curriculum.on_grid(pairs, "tokens")
    assert grid[-1] == 400 and curves["curriculum"].shape == (3, curriculum.GRID_POINTS)
    assert curves["curriculum"][0, -1] == pytest.approx(0.3 + 0.1), "half of its own way, since it takes twice the tokens"
    assert curves["uniform"][0, -1] == pytest.approx(0.3 + 0.1)
    found = curriculum.measures(runs)
    ends = found["success per_episode, where it ends"]
    assert ends["difference"] == pytest.approx((0.1 + 0.3 + 0.2) / 3) and ends["num_ahead"] == 3
    assert ends["standard_error"] == pytest.approx(np.std([0.1, 0.3, 0.2], ddof=1) / np.sqrt(3))
    assert found["groups without a signal, share"]["uniform"] == 0.75
    assert found["groups with a signal per million tokens"]["curriculum"] == pytest.approx(1e6 * 2 / 800)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([0.05, 0.04, 0.06, 0.05, 0.05], "help"),
        ([-0.05, -0.04, -0.06, -0.05, -0.05], "harm"),
        ([0.05, 0.04, -0.06, 0.05, -0.05], "no difference shown"),
        ([0.02, 0.0, 0.0, 0.03, 0.02], "no difference shown"),
        ([0.0] * 5, "no difference shown"),
        ([0.05, 0.05], "too few seeds"),
    ],
)
def test_a_comparison_is_read_by_its_interval_and_by_how_many_seeds_share_it(differences: list[float], said: str) -> None:
    uniform = [0.5] * len(differences)
    assert curriculum.verdict(curriculum.compared(uniform, [0.5 + difference for difference in differences])) == said


def test_numbers_are_drawn_and_told_in_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm in curriculum.ARMS:
        for seed in (0, 1):
            write_run(tmp_path / "runs", arm, seed)
    options = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--collect"]
    assert curriculum.main(options) == 0
    assert (tmp_path / "out" / "curriculum.png").stat().st_size > 20_000
    told = capsys.readouterr().out
    assert "| success per_episode, mean of the curve | 0.400 | 0.400 | +0.000 ± 0.000 | 0 of 2 | too few seeds |" in told
    assert "| easy | 0.500, 0.500 | 0.500, 0.500 | 0.500 → 0.900, 0.900 |" in told
    assert "| uniform, seed 0 | 4 | 0.300 → 0.500 | 77 | 0.5, 2.0 | abcdef0 |" in told
    assert curriculum.main([*options[:4], "--table"]) == 0
    assert capsys.readouterr().out == told


def test_shares_of_the_tiers_are_means_over_neighbouring_steps() -> None:
    run = {"tiers": {"a": {"episodes": [2, 2, 0, 0]}, "b": {"episodes": [0, 0, 2, 2]}}}
    found = curriculum.shares(run, width=3)
    assert found["a"].tolist() == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    assert (found["a"] + found["b"]).tolist() == pytest.approx([1.0] * 4)


def test_a_run_that_is_complete_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum.subprocess, "run", lambda *_, **__: pytest.fail("trained"))
    folder = write_run(tmp_path, "uniform", 0, num_steps=1)
    assert curriculum.run("uniform", 0, tmp_path, curriculum.Console(quiet=True), again=False) == folder


def test_the_two_configurations_differ_in_how_tasks_are_drawn_and_in_their_names_alone() -> None:
    uniform, other = (load_config(curriculum.CONFIGS / f"{arm}.toml").model_dump() for arm in curriculum.ARMS)
    tasks = [config["orchestrator"]["train"]["env"][0].pop("tasks")["type"] for config in (uniform, other)]
    names = [config["run"].pop("name") for config in (uniform, other)]
    assert tasks == names == list(curriculum.ARMS)
    for config in (uniform, other):
        config["run"].pop("output_dir", None)
    assert uniform == other
