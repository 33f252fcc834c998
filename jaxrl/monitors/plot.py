"""Pictures: the reward curve of a run, and the success of one evaluation by difficulty.

In: a run folder, whose `metrics.jsonl` alone is read, so that any run can be drawn again; or the scores of an evaluation. Out:
`reward_curve.png`, with every step's mean reward, a smoothed curve, and the scores of the base policy and of later ones on held-out tasks;
or a PNG with a bar for each difficulty. It keeps no state in matplotlib and needs no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxrl.monitors import metrics
from jaxrl.monitors.jsonl import read_lines

_INK, _FAINT, _CURVE = "#1f2933", "#9aa5b1", "#0b7285"
_EVAL_COLOURS = ("#d9480f", "#5f3dc4", "#2b8a3e", "#c2255c")
_SCORE = "success_rate"


def draw_reward_curve(run_dir: Path, name: str) -> Path | None:
    """Draw the reward per step, and the held-out score before and after, of one run.

    Args:
      run_dir: holds `metrics.jsonl`.
      name: title of the picture.

    Returns:
      The path of the picture, or None when no row has a reward yet.
    """
    rows = read_lines(run_dir / "metrics.jsonl")
    rewards = [(row["step"], row[metrics.REWARD_MEAN]) for row in rows if row["step"] > 0 and metrics.REWARD_MEAN in row]
    if not rewards:
        return None
    steps_N, rewards_N = (np.array(column, dtype=np.float64) for column in zip(*rewards, strict=True))
    figure = Figure(figsize=(8.0, 4.5), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps_N, rewards_N, "o", color=_CURVE, alpha=0.28, markersize=3.5, markeredgewidth=0, label="mean reward of a step")
    axes.plot(steps_N, smooth(rewards_N), color=_CURVE, linewidth=2.4, solid_capstyle="round", label="smoothed")
    scores = _eval_points(rows)
    for colour, (env_name, points) in zip(_EVAL_COLOURS, scores.items(), strict=False):
        _draw_eval(axes, env_name, points, colour)
    _dress(axes, rewards_N, [value for points in scores.values() for _, value in points])
    edge = max(1, min(5, len(rewards_N) // 2))
    axes.set_title(
        f"{name}: reward {rewards_N[:edge].mean():.2f} → {rewards_N[-edge:].mean():.2f} in {int(steps_N[-1])} steps",
        loc="left", fontsize=12, fontweight="bold", color=_INK, pad=10,
    )  # fmt: skip
    path = run_dir / "reward_curve.png"
    figure.savefig(path)
    return path


def draw_success_by_difficulty(scores: Mapping[str, Any], path: Path, title: str) -> bool:
    """Draw the success rate of each difficulty with its standard error, if there are several.

    Args:
      scores: of `evals.score_rows`.
      path: the picture, a PNG.
      title: what was evaluated.

    Returns:
      Whether there was anything to draw.
    """
    kinds = {name: kind for name, kind in scores.get("by_difficulty", {}).items() if "success_rate" in kind}
    if len(kinds) < 2:
        return False
    rates, spreads = ([kind[key] for kind in kinds.values()] for key in ("success_rate", "success_rate_se"))
    figure = Figure(figsize=(8.0, 4.0), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(list(kinds), rates, yerr=spreads, color=_CURVE, width=0.7, error_kw={"ecolor": _INK, "elinewidth": 1.0, "capsize": 3})
    axes.set_ylim(0.0, 1.06)
    axes.set_xlabel("difficulty", color=_INK)
    axes.set_ylabel("success rate", color=_INK)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=10)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=3)
    figure.savefig(path)
    return True


def smooth(values_N: np.ndarray, halflife_steps: float = 3.0) -> np.ndarray:
    """Return the centred exponential average of a series: each value counts by its distance in steps, to both sides.

    Args:
      values_N: [N] float.
      halflife_steps: distance at which a value's weight has halved.

    Returns:
      [N] float64; a constant series stays as it is, also at its ends.
    """
    num = len(values_N)
    distance_NN = np.abs(np.subtract.outer(np.arange(num), np.arange(num)))
    weights_NN = 0.5 ** (distance_NN / halflife_steps)
    return weights_NN @ values_N / weights_NN.sum(axis=1)


def _eval_points(rows: Sequence[dict[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """Return (version, success rate) by environment."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith(f"/{_SCORE}"):
                points.setdefault(key.removeprefix("eval/").removesuffix(f"/{_SCORE}"), []).append((int(row["step"]), value))
    return points


def _draw_eval(axes: Axes, env_name: str, points: Sequence[tuple[int, float]], colour: str) -> None:
    steps, values = zip(*points, strict=True)
    label = f"held-out success: {env_name}"
    axes.plot(steps, values, "D--", color=colour, linewidth=1.1, markersize=6.5, markeredgecolor="white", label=label)
    ends = [(points[0], (8, -14), "left")] + ([(points[-1], (-8, 10), "right")] if len(points) > 1 else [])
    for (step, value), offset, side in ends:
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=colour,
            fontsize=10,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
            zorder=5,
        )


def _dress(axes: Axes, rewards_N: np.ndarray, scores: Sequence[float]) -> None:
    """Axes, grid and legend; rewards within 0 and 1 get the whole range, so that two runs can be compared by eye."""
    values = np.concatenate([rewards_N, np.asarray(scores, dtype=np.float64)])
    if values.min() >= 0.0 and values.max() <= 1.0:
        axes.set_ylim(-0.02, 1.06)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("reward", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=3)
    axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=_INK)
