"""Compare a curriculum with uniform draws over five seeds, keep the numbers and draw the curves: `python benchmarks/curriculum.py`.

In: `configs/curriculum/{uniform,curriculum}.toml` and the start model that `configs/curriculum/prepare.py` made. Out: run folders under
`runs/curriculum/` (not committed), and `docs/results/curriculum/curriculum.{json,png}`. A run that is there already is not done again,
unless `--again` says so. What is compared, and how it is read, was written down before the runs: `docs/results/curriculum.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from jaxrl.monitors.jsonl import read_lines

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "curriculum"
RESULTS = ROOT / "docs" / "results" / "curriculum"
RUN_DEADLINE_S = 3600.0
ARMS = ("uniform", "curriculum")
SEEDS = (0, 1, 2, 3, 4)
GRID_POINTS = 41
TASKS, EVAL = "tasks/sums", "eval/sums_heldout"
SCORES = {"per_episode": "episodes", "per_token": "tokens"}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Number of pairs -> two-sided 95% quantile of Student's t with one degree of freedom less."""
INK, FAINT = "#1f2933", "#9aa5b1"
ARM_COLOURS = {"uniform": "#d9480f", "curriculum": "#0b7285"}
TIER_COLOURS = ("#d0ebff", "#74c0fc", "#339af0", "#1c7ed6", "#1864ab", "#0b3d66", "#051f33")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, collect and draw."""
    parser = argparse.ArgumentParser(description="Compare a curriculum with uniform draws, and draw the curves.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="run.seed of each pair of runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/curriculum"), help="where run folders go")
    parser.add_argument("--again", action="store_true", help="delete run folders that are there and run anew")
    parser.add_argument("--collect", action="store_true", help="run nothing: read the run folders that are complete")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers and the picture go")
    parser.add_argument("--table", action="store_true", help="only print the tables of what is there")
    args = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    path = args.out / "curriculum.json"
    if not args.table:
        # Pairs one after the other, so that an evening that ends early leaves whole pairs, run under a similar load.
        if not args.collect:
            for seed in args.seeds:
                for arm in ARMS:
                    run(arm, seed, args.runs, console, again=args.again)
        runs = [collect(arm, args.runs / f"{arm}-{seed}") for seed in args.seeds for arm in ARMS if is_complete(args.runs, arm, seed)]
        if not runs:
            raise SystemExit(f"no complete run in {args.runs}")
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")
        draw(runs, args.out / "curriculum.png")
    console.print(table(json.loads(path.read_text(encoding="utf-8"))["runs"]), markup=False)
    return 0


def is_complete(runs: Path, arm: str, seed: int) -> bool:
    """Say whether a run came to its end."""
    return (runs / f"{arm}-{seed}" / "benchmark.json").is_file()


def run(arm: str, seed: int, runs: Path, console: Console, *, again: bool) -> Path:
    """Train one arm with one seed, unless its folder is complete already; returns the folder."""
    folder = runs / f"{arm}-{seed}"
    if is_complete(runs, arm, seed) and not again:
        console.print(f"{folder} is there already")
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "jaxrl.train", "--config", str((CONFIGS / f"{arm}.toml").relative_to(ROOT))]
    command += ["--run.name", f"{arm}-{seed}", "--run.seed", str(seed), "--run.output_dir", str(folder.absolute())]
    console.print(f"{arm}, seed {seed}: {' '.join(command)}")
    load = os.getloadavg()[0]
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"{arm}, seed {seed}: the run ended with code {done.returncode}; see {folder}")
    told = {"seed": seed, "wall_s": round(time.monotonic() - began_s), "load_before": round(load, 1)}
    told["load_after"] = round(os.getloadavg()[0], 1)
    (folder / "benchmark.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    return folder


def collect(arm: str, folder: Path) -> dict[str, Any]:
    """Return what one run says, as a JSON object.

    Returns:
      `points`: one for each evaluation, with the `episodes` and generated `tokens` of training before it, `success` (the mean over tiers,
      each counting alike) and `success_by_tier`. `steps`: running totals after each step. `tiers`: for each tier and step, how many
      `episodes` were played, and how many `groups` and `signal_groups` ended, in that step alone.
    """
    rows = read_lines(folder / "metrics.jsonl")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    about = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    code = {"commit": environment["commit"], "is_modified": environment["is_modified"], "num_cpus": environment["num_cpus"]}
    steps = [totals(row) for row in rows if f"{TASKS}/episodes" in row]
    before = {0: (0.0, 0.0)} | {step["step"]: (step["episodes"], step["tokens"]) for step in steps}
    points = []
    for row in rows:
        by_tier = tier_scores(row)
        if by_tier:
            episodes, tokens = before[int(row["step"])]
            success = float(np.mean(list(by_tier.values())))
            points.append(
                {"step": int(row["step"]), "episodes": episodes, "tokens": tokens, "success": success, "success_by_tier": by_tier}
            )
    return {"arm": arm} | about | code | {"points": points, "steps": steps, "tiers": tiers_of(folder, [step["step"] for step in steps])}


def totals(row: Mapping[str, float]) -> dict[str, Any]:
    """Return the task sampler's running totals after a step."""
    names = {"groups": "groups", "signal_groups": "signal_groups", "episodes": "episodes", "tokens": "cost"}
    return {"step": int(row["step"])} | {name: row[f"{TASKS}/{counter}"] for name, counter in names.items()}


def tier_scores(row: Mapping[str, float]) -> dict[str, float]:
    """Return the held-out success of each tier, if a row of metrics has an evaluation."""
    prefix, suffix = f"{EVAL}/by_difficulty/", "/success_rate"
    return {key[len(prefix) : -len(suffix)]: value for key, value in row.items() if key.startswith(prefix) and key.endswith(suffix)}


def tiers_of(folder: Path, steps: Sequence[int]) -> dict[str, dict[str, list[int]]]:
    """Count the rollouts, the groups and the groups with a signal of each tier and step, from the log of rollouts."""
    found: dict[str, dict[str, list[int]]] = {}
    for index, step in enumerate(steps):
        rewards: dict[tuple[str, str], list[float | None]] = {}
        for rollout in read_lines(folder / "rollouts" / f"step_{step:06d}.jsonl"):
            rewards.setdefault((rollout["task"]["difficulty"], rollout["group_id"]), []).append(rollout["reward"])
        for (tier, _), of_group in rewards.items():
            counts = found.setdefault(tier, {name: [0] * len(steps) for name in ("episodes", "groups", "signal_groups")})
            counts["episodes"][index] += len(of_group)
            counts["groups"][index] += 1
            counts["signal_groups"][index] += len({reward for reward in of_group if reward is not None}) > 1
    return dict(sorted(found.items()))


def paired(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Mapping[str, Any]]]:
    """Return the runs of each seed that has all arms, by arm."""
    by_seed: dict[int, dict[str, Mapping[str, Any]]] = {}
    for each in runs:
        by_seed.setdefault(each["seed"], {})[each["arm"]] = each
    return [arms for _, arms in sorted(by_seed.items()) if set(arms) == set(ARMS)]


def on_grid(pairs: Sequence[Mapping[str, Mapping[str, Any]]], axis: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return held-out success on one grid that all runs cover, interpolated between evaluations.

    Args:
      pairs: the runs of each seed, by arm.
      axis: `episodes` or `tokens`.

    Returns:
      The grid, from 0 to where the first run ends, and by arm an array [seeds, grid].
    """
    last = min(each["points"][-1][axis] for arms in pairs for each in arms.values())
    grid_G = np.linspace(0.0, last, GRID_POINTS)
    curves = {}
    for arm in ARMS:
        points = [arms[arm]["points"] for arms in pairs]
        curves[arm] = np.stack([np.interp(grid_G, [p[axis] for p in of_run], [p["success"] for p in of_run]) for of_run in points])
    return grid_G, curves


def compared(uniform_S: Sequence[float], curriculum_S: Sequence[float]) -> dict[str, float]:
    """Return the means, the mean of the paired differences, its standard error over seeds, and in how many seeds the curriculum is ahead.

    Example:
      >>> compared([0.5, 0.6], [0.6, 0.8])["difference"].__round__(6)
      0.15
    """
    differences_S = np.asarray(curriculum_S, np.float64) - np.asarray(uniform_S, np.float64)
    num = len(differences_S)
    error = float(differences_S.std(ddof=1) / np.sqrt(num)) if num > 1 else float("nan")
    return {
        "uniform": float(np.mean(uniform_S)),
        "curriculum": float(np.mean(curriculum_S)),
        "difference": float(differences_S.mean()),
        "standard_error": error,
        "num_ahead": int((differences_S > 0).sum()),
        "num_seeds": num,
    }


def verdict(numbers: Mapping[str, float]) -> str:
    """Read a comparison by the rule that was written before the runs.

    Help is a difference above 0 whose 95% interval over seeds leaves 0 out and that at most one seed does not share; harm mirrors it.
    """
    num, reach = int(numbers["num_seeds"]), T_95.get(int(numbers["num_seeds"]), 2.3) * numbers["standard_error"]
    if num < 3:
        return "too few seeds"
    if numbers["difference"] > reach and numbers["num_ahead"] >= num - 1:
        return "help"
    if numbers["difference"] < -reach and numbers["num_ahead"] <= 1:
        return "harm"
    return "no difference shown"


def measures(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return every comparison of the two arms, by its name; without a pair of runs there is none."""
    pairs = paired(runs)
    if not pairs:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, axis in SCORES.items():
        _, curves = on_grid(pairs, axis)
        found[f"success {name}, mean of the curve"] = compared(*(curves[arm].mean(axis=1) for arm in ARMS))
        found[f"success {name}, where it ends"] = compared(*(curves[arm][:, -1] for arm in ARMS))
    ratios = {
        "groups without a signal, share": lambda end: 1 - end["signal_groups"] / end["groups"],
        "groups with a signal per 1000 episodes": lambda end: 1e3 * end["signal_groups"] / end["episodes"],
        "groups with a signal per million tokens": lambda end: 1e6 * end["signal_groups"] / end["tokens"],
        "tokens per episode": lambda end: end["tokens"] / end["episodes"],
    }
    for name, ratio in ratios.items():
        found[name] = compared(*([ratio(arms[arm]["steps"][-1]) for arms in pairs] for arm in ARMS))
    return found


def shares(run: Mapping[str, Any], width: int = 5) -> dict[str, np.ndarray]:
    """Return the share of each tier in the rollouts, in running means over `width` steps (fewer at the ends)."""
    counts = {tier: np.asarray(of_tier["episodes"], np.float64) for tier, of_tier in run["tiers"].items()}
    all_N = sum(counts.values())
    kernel = np.ones(width)
    return {tier: np.convolve(of_tier, kernel, "same") / np.convolve(all_N, kernel, "same") for tier, of_tier in counts.items()}


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers as Markdown tables: the comparisons, the tiers, the runs."""
    lines = ["| measure | uniform | curriculum | difference ± standard error | ahead | reading |", "|" + "---|" * 6]
    for name, n in measures(runs).items():
        places = 3 if n["uniform"] < 2 else 1
        said = verdict(n) if name.startswith("success") else ""
        lines.append(
            f"| {name} | {n['uniform']:.{places}f} | {n['curriculum']:.{places}f} | {n['difference']:+.{places}f} ± "
            f"{n['standard_error']:.{places}f} | {n['num_ahead']} of {n['num_seeds']} | {said} |"
        )
    lines += ["", "| tier | share of episodes | groups with a signal | held-out success, before → after |", "|" + "---|" * 4]
    lines += tier_lines(runs)
    lines += ["", "| run | steps | success, before → after | wall time, s | load before, after | commit |", "|" + "---|" * 6]
    for each in runs:
        commit = f"{(each['commit'] or 'none')[:7]}{'+' if each['is_modified'] else ''}"
        ends = f"{each['points'][0]['success']:.3f} → {each['points'][-1]['success']:.3f}"
        name, num_steps = f"{each['arm']}, seed {each['seed']}", each["steps"][-1]["step"]
        lines.append(f"| {name} | {num_steps} | {ends} | {each['wall_s']} | {each['load_before']}, {each['load_after']} | {commit} |")
    return "\n".join(lines)


def tier_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each tier; where two numbers are given, the first is of uniform draws and the second of the curriculum."""
    lines = []
    for tier in sorted({tier for each in runs for tier in each["tiers"]}):
        cells: dict[str, list[str]] = {"share": [], "signal": [], "after": []}
        before = float(np.mean([each["points"][0]["success_by_tier"][tier] for each in runs]))
        for arm in ARMS:
            of_arm = [each for each in runs if each["arm"] == arm]
            counts = [each["tiers"].get(tier, {"episodes": [0], "groups": [0], "signal_groups": [0]}) for each in of_arm]
            episodes = sum(sum(count["episodes"]) for count in counts)
            groups = sum(sum(count["groups"]) for count in counts)
            everything = sum(each["steps"][-1]["episodes"] for each in of_arm)
            cells["share"].append(f"{episodes / max(everything, 1):.3f}")
            cells["signal"].append(f"{sum(sum(count['signal_groups']) for count in counts) / max(groups, 1):.3f}")
            ends = [each["points"][-1]["success_by_tier"][tier] for each in of_arm]
            cells["after"].append(f"{np.mean(ends):.3f}" if ends else "none")
        lines.append(
            f"| {tier} | {', '.join(cells['share'])} | {', '.join(cells['signal'])} | {before:.3f} → {', '.join(cells['after'])} |"
        )
    return lines


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw held-out success per episode and per generated token, and what the curriculum drew over time."""
    figure = Figure(figsize=(14.2, 3.9), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    by_episode, by_token, by_tier = figure.subplots(1, 3)
    pairs = paired(runs)
    for axes, axis, label in ((by_episode, "episodes", "thousand episodes"), (by_token, "tokens", "thousand generated tokens")):
        for each in runs:
            x = [point[axis] / 1e3 for point in each["points"]]
            axes.plot(x, [point["success"] for point in each["points"]], color=ARM_COLOURS[each["arm"]], alpha=0.3, linewidth=0.9)
        if pairs:
            draw_means(axes, *on_grid(pairs, axis), 1e3)
        dress(axes, f"held-out success, mean of tiers, per {axis[:-1]}", label)
        axes.legend(frameon=False, loc="lower right", fontsize=8.5, labelcolor=INK)
    draw_shares(by_tier, [each for each in runs if each["arm"] == "curriculum"])
    figure.savefig(path)


def draw_means(axes: Axes, grid_G: np.ndarray, curves: Mapping[str, np.ndarray], scale: float) -> None:
    """Draw the mean over seeds of each arm, with its standard error."""
    for arm, curves_SG in curves.items():
        mean_G = curves_SG.mean(axis=0)
        axes.plot(grid_G / scale, mean_G, color=ARM_COLOURS[arm], linewidth=2.2, label=arm)
        if len(curves_SG) > 1:
            error_G = curves_SG.std(axis=0, ddof=1) / np.sqrt(len(curves_SG))
            axes.fill_between(grid_G / scale, mean_G - error_G, mean_G + error_G, color=ARM_COLOURS[arm], alpha=0.18, linewidth=0)


def draw_shares(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw the share of each tier in the rollouts of the curriculum, means over seeds, as layers."""
    if runs:
        num_steps = min(len(each["steps"]) for each in runs)
        tiers = sorted({tier for each in runs for tier in each["tiers"]})
        of_runs = [shares(each) for each in runs]
        layers = [np.mean([of_run.get(tier, np.zeros(num_steps))[:num_steps] for of_run in of_runs], axis=0) for tier in tiers]
        axes.stackplot(np.arange(1, num_steps + 1), layers, labels=[tier.replace("_", " ") for tier in tiers], colors=TIER_COLOURS)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5, labelcolor=INK)
    dress(axes, "share of each tier in the curriculum's episodes", "step")
    axes.set_ylim(0.0, 1.0)


def dress(axes: Axes, title: str, label: str) -> None:
    """Give axes the house's look."""
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(label, color=INK)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=3, which="both", labelsize=8)


if __name__ == "__main__":
    sys.exit(main())
