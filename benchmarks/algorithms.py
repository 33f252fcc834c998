"""Run each shipped algorithm with its seeds, keep the numbers and draw the curves: `python benchmarks/algorithms.py grpo opd`.

In: names of configurations under `configs/algorithms/`, and what `configs/algorithms/prepare.py` made. Out: run folders under
`runs/algorithms/` (not committed), and under `docs/results/algorithms/` a JSON file and a picture of each algorithm. A run that is
there already is not done again, unless `--again` says so. The server of a frozen model is started for those that ask one, and stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from jaxrl.config.load import load_config
from jaxrl.config.serve import ServeConfig
from jaxrl.monitors.jsonl import read_lines
from jaxrl.monitors.plot import smooth

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "algorithms"
RESULTS = ROOT / "docs" / "results" / "algorithms"
SERVER_CONFIG = CONFIGS / "serve_teacher.toml"
SERVER_DEADLINE_S = 300.0
RUN_DEADLINE_S = 3600.0
INK, FAINT = "#1f2933", "#9aa5b1"
SEED_COLOURS = ("#0b7285", "#d9480f", "#5f3dc4")

REWARD = "rollout/reward/mean"
SUCCESS = "eval/chain_sum_heldout/success_rate"
NLL = "eval/chain_sum_heldout/demonstration_nll"
LOG_RATIO = "ref_kl/log_ratio/mean"
CE = "ce/nll/mean"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    metric: str
    title: str
    sign: float = 1.0
    """-1 draws the negative."""
    is_log: bool = False


REWARD_PANEL = Panel(REWARD, "mean reward of a step")
SUCCESS_PANEL = Panel(SUCCESS, "held-out accuracy, greedy")
NLL_PANEL = Panel(NLL, "held-out NLL of worked answers, nats per token")
KL_PANEL = Panel(LOG_RATIO, "KL(policy ‖ teacher) on the policy's tokens, nats", sign=-1.0, is_log=True)

TOOLS_PANEL = Panel("eval/tools_heldout/success_rate", "held-out accuracy with the tool, greedy")


@dataclass(frozen=True)
class Plan:
    """What is done with one configuration."""

    seeds: tuple[int, ...]
    panels: tuple[Panel, ...] = (REWARD_PANEL, SUCCESS_PANEL)
    needs_server: bool = False


PLANS = {
    "grpo": Plan((0, 1, 2)),
    "max_rl": Plan((0, 1, 2)),
    "rloo": Plan((0,)),
    "reinforce": Plan((0,)),
    "rae": Plan((0,)),
    "sft": Plan((0,), (Panel(CE, "NLL of the teacher's answers, nats per token"), NLL_PANEL, SUCCESS_PANEL), True),
    "sft_demonstrations": Plan((0,), (Panel(CE, "NLL of the demonstrations, nats per token"), NLL_PANEL, SUCCESS_PANEL)),
    "opd": Plan((0,), (KL_PANEL, REWARD_PANEL, SUCCESS_PANEL), True),
    "tools_grpo": Plan((0, 1), (REWARD_PANEL, TOOLS_PANEL)),
    "echo": Plan((0, 1), (REWARD_PANEL, TOOLS_PANEL, Panel(CE, "NLL of the tool's results, nats per token"))),
    "self_distill": Plan((0, 1), (KL_PANEL, REWARD_PANEL, SUCCESS_PANEL)),
    "mixed_grpo_opd": Plan(
        (0,),
        (
            Panel("eval/three_terms/success_rate", "grpo: held-out accuracy, 3 terms"),
            Panel("eval/four_terms/success_rate", "opd: held-out accuracy, 4 terms"),
            Panel(LOG_RATIO, "opd: KL(policy ‖ teacher), nats", sign=-1.0, is_log=True),
        ),
        True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, collect and draw."""
    parser = argparse.ArgumentParser(description="Run shipped algorithm configurations and draw their curves.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"algorithms, all by default: {', '.join(PLANS)}")
    parser.add_argument("--seeds", type=int, nargs="+", help="run.seed of each run; each algorithm has its own default")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"), help="where run folders go")
    parser.add_argument("--again", action="store_true", help="delete run folders that are there and run anew")
    parser.add_argument("--table", action="store_true", help="only print the table of what docs/results/algorithms/ holds")
    args = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    unknown = [name for name in args.names if name not in PLANS]
    if unknown:
        parser.error(f"unknown: {unknown[0]!r}; known: {', '.join(PLANS)}")
    names = args.names or list(PLANS)
    if args.table:
        console.print(table(names), markup=False)
        return 0
    for name in names:
        plan = PLANS[name]
        with served_teacher(args.runs, console) if plan.needs_server else contextlib.nullcontext():
            folders = [run(name, seed, args.runs, console, again=args.again) for seed in args.seeds or plan.seeds]
        numbers = collect(name, folders)
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        draw(name, numbers, RESULTS / f"{name}.png")
        console.print(table([name]), markup=False)
    return 0


@contextlib.contextmanager
def served_teacher(runs: Path, console: Console) -> Iterator[None]:
    """Serve the frozen model for the body of the `with`, unless its address serves it already."""
    config = load_config(SERVER_CONFIG, (), ServeConfig)
    url = f"http://{config.server.host}:{config.server.port}"
    if is_healthy(url):
        console.print(f"{url} serves already")
        yield
        return
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "server.log").open("ab") as log:
        command = [sys.executable, "-m", "jaxrl.serve", "--config", str(SERVER_CONFIG.relative_to(ROOT))]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + SERVER_DEADLINE_S
        while not is_healthy(url):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server of {config.served_name!r} did not start; {runs / 'server.log'} tells why")
            time.sleep(0.5)
        console.print(f"{url} serves {config.served_name!r}")
        yield
    finally:
        server.terminate()
        server.wait(timeout=60)


def is_healthy(url: str) -> bool:
    """Say whether a server answers and is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def run(name: str, seed: int, runs: Path, console: Console, *, again: bool) -> Path:
    """Train one configuration with one seed, unless its folder is complete already; returns the folder."""
    folder = runs / f"{name}-{seed}"
    told = folder / "benchmark.json"
    if told.is_file() and not again:
        console.print(f"{folder} is there already")
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "jaxrl.train", "--config", str((CONFIGS / f"{name}.toml").relative_to(ROOT))]
    command += ["--run.name", f"{name}-{seed}", "--run.seed", str(seed), "--run.output_dir", str(folder.absolute())]
    console.print(f"{name}, seed {seed}: {' '.join(command)}")
    load = os.getloadavg()[0]
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_DEADLINE_S, check=False)
    wall_s = time.monotonic() - began_s
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: the run ended with code {done.returncode}; see {folder}")
    loads = {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}
    told.write_text(json.dumps({"seed": seed, "wall_s": round(wall_s), **loads}) + "\n", encoding="utf-8")
    return folder


def collect(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the curves of one algorithm's runs and how they were made, as a JSON object."""
    runs = []
    for folder in folders:
        rows = read_lines(folder / "metrics.jsonl")
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        wanted = {panel.metric for panel in PLANS[name].panels} | {key for key in rows[0] if is_score(key)}
        curves = {key: [[row["step"], float(f"{row[key]:.5g}")] for row in rows if key in row] for key in sorted(wanted)}
        about = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
        code = {"commit": environment["commit"], "is_modified": environment["is_modified"], "num_cpus": environment["num_cpus"]}
        runs.append(about | {"steps": int(rows[-1]["step"])} | code | {"curves": curves})
    return {"algorithm": name, "config": f"configs/algorithms/{name}.toml", "runs": runs}


def is_score(key: str) -> bool:
    """Say whether a metric is a score that tells how well the policy does on held-out questions."""
    return key.startswith("eval/") and key.endswith(("/success_rate", "/demonstration_nll"))


def ends(points: Sequence[Sequence[float]], width: int = 5) -> tuple[float, float]:
    """Return what a curve starts and ends with: single points of a score, means of `width` steps of anything longer."""
    values = [value for _, value in points]
    width = 1 if len(values) < 4 * width else width
    return float(np.mean(values[:width])), float(np.mean(values[-width:]))


def table(names: Sequence[str]) -> str:
    """Return the numbers that are kept, as a Markdown table with a line for each run."""
    lines = ["| configuration | seed | steps | measure | before → after | wall time, s | load before, after | commit |", "|" + "---|" * 8]
    for name in names:
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            continue
        for kept in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            for number, panel in enumerate(PLANS[name].panels):
                points = kept["curves"].get(panel.metric)
                if not points:
                    continue
                before, after = (panel.sign * value for value in ends(points))
                loads = f"{kept['load_before']}, {kept['load_after']}"
                commit = f"{(kept['commit'] or 'none')[:7]}{'+' if kept['is_modified'] else ''}"
                first = [f"`{name}`", str(kept["seed"]), str(kept["steps"])] if number == 0 else ["", "", ""]
                last = [str(kept["wall_s"]), loads, commit] if number == 0 else ["", "", ""]
                lines.append(f"| {' | '.join([*first, panel.title, f'{before:.3f} → {after:.3f}', *last])} |")
    return "\n".join(lines)


def draw(name: str, numbers: dict[str, Any], path: Path) -> None:
    """Draw one pair of axes per panel and one line per seed."""
    panels = PLANS[name].panels
    figure = Figure(figsize=(4.6 * len(panels), 3.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        for colour, kept in zip(SEED_COLOURS, numbers["runs"], strict=False):
            draw_curve(axes, panel, kept["curves"].get(panel.metric) or [], f"seed {kept['seed']}", colour)
        dress(axes, panel)
    figure.suptitle(name, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.savefig(path)


def draw_curve(axes: Axes, panel: Panel, points: Sequence[Sequence[float]], label: str, colour: str) -> None:
    """Draw one run: scores as diamonds that are joined, steps as dots with a smoothed line."""
    if not points:
        return
    steps_N, values_N = np.asarray(points, np.float64).T
    values_N = panel.sign * values_N
    if panel.is_log:
        values_N = np.where(values_N > 0, values_N, np.nan)
    if panel.metric.startswith("eval/"):
        axes.plot(steps_N, values_N, "D-", color=colour, linewidth=1.3, markersize=5, markeredgecolor="white", label=label)
        return
    axes.plot(steps_N, values_N, "o", color=colour, alpha=0.28, markersize=3, markeredgewidth=0)
    is_there_N = np.isfinite(values_N)
    axes.plot(steps_N[is_there_N], smooth(values_N[is_there_N]), color=colour, linewidth=2, label=label)


def dress(axes: Axes, panel: Panel) -> None:
    """Give axes the house's look."""
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("step", color=INK)
    if panel.is_log:
        axes.set_yscale("log")
    elif panel.metric.endswith(("success_rate", "reward/mean")):
        axes.set_ylim(-0.02, 1.04)
    else:
        axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", which="both", color=FAINT, alpha=0.25, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=3, which="both", labelsize=8)
    axes.legend(frameon=False, loc="best", fontsize=8.5, labelcolor=INK)


if __name__ == "__main__":
    sys.exit(main())
