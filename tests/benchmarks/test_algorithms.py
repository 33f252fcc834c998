"""Running and drawing the shipped algorithms: what is collected from run folders, and that every plan fits its configuration."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from jaxrl.config.load import load_config
from jaxrl.config.serve import ServeConfig

PATH = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_algorithms", PATH)
assert SPEC is not None and SPEC.loader is not None
algorithms = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = algorithms
SPEC.loader.exec_module(algorithms)


def write_run(folder: Path, *, num_steps: int) -> Path:
    """Write what a run of OPD leaves behind: KL 2.0 at step 1, halved at each step, and two evaluations."""
    folder.mkdir(parents=True)
    rows: list[dict[str, float]] = [{"step": 0, algorithms.SUCCESS: 0.5}]
    rows += [{"step": step, algorithms.LOG_RATIO: -(2.0 ** (2 - step)), algorithms.REWARD: step / 100} for step in range(1, num_steps + 1)]
    rows[-1][algorithms.SUCCESS] = 0.9
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps({"commit": "abcdef0123", "is_modified": True, "num_cpus": 2}))
    about = {"seed": 4, "wall_s": 77, "load_before": 0.5, "load_after": 2.0}
    (folder / "benchmark.json").write_text(json.dumps(about))
    return folder


def test_curves_of_a_run_are_kept_drawn_and_told_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = algorithms.collect("opd", [write_run(tmp_path / "opd-4", num_steps=4)])
    (run,) = numbers["runs"]
    assert run["curves"][algorithms.SUCCESS] == [[0, 0.5], [4, 0.9]]
    assert run["curves"][algorithms.LOG_RATIO] == [[1, -2.0], [2, -1.0], [3, -0.5], [4, -0.25]]
    monkeypatch.setattr(algorithms, "RESULTS", tmp_path)
    (tmp_path / "opd.json").write_text(json.dumps(numbers))
    algorithms.draw("opd", numbers, tmp_path / "opd.png")
    assert (tmp_path / "opd.png").stat().st_size > 10_000
    lines = algorithms.table(["opd", "grpo"]).splitlines()
    assert lines[2].startswith("| `opd` | 4 | 4 | KL") and lines[2].endswith("| 2.000 → 0.250 | 77 | 0.5, 2.0 | abcdef0+ |")
    assert "held-out accuracy, greedy | 0.500 → 0.900 |" in lines[4] and len(lines) == 5


def test_a_long_curve_starts_and_ends_with_the_mean_of_five_steps_and_a_short_one_with_single_points() -> None:
    assert algorithms.ends([[step, float(step)] for step in range(1, 21)]) == (3.0, 18.0)
    assert algorithms.ends([[0, 0.5], [10, 0.7], [20, 0.9]]) == (0.5, 0.9)


def test_a_run_that_is_complete_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms.subprocess, "run", lambda *_, **__: pytest.fail("trained"))
    folder = write_run(tmp_path / "grpo-0", num_steps=1)
    assert algorithms.run("grpo", 0, tmp_path, algorithms.Console(quiet=True), again=False) == folder


def test_every_shipped_configuration_has_a_plan_that_fits_it() -> None:
    shipped = {path.stem for path in algorithms.CONFIGS.glob("*.toml")} - {algorithms.SERVER_CONFIG.stem}
    assert shipped == set(algorithms.PLANS)
    server = load_config(algorithms.SERVER_CONFIG, (), ServeConfig)
    for name, plan in algorithms.PLANS.items():
        config = load_config(algorithms.CONFIGS / f"{name}.toml")
        algos = [config.orchestrator.algo_of(env) for env in config.orchestrator.train.env]
        models = [model for algo in algos for model in algo.frozen_models.values()]
        assert bool(models) == plan.needs_server, name
        for model in models:
            assert model.name == server.served_name
            assert model.base_url == [f"http://{server.server.host}:{server.server.port}/v1"]
            assert server.engine.max_model_len >= config.engine.max_model_len
        scored = {panel.metric.split("/")[1] for panel in plan.panels if panel.metric.startswith("eval/")}
        assert scored <= {env.name for env in config.orchestrator.eval.env}, name
