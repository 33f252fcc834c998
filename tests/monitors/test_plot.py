"""`jaxrl.monitors.plot`: the reward curve, from `metrics.jsonl` alone."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from jaxrl.monitors.jsonl import append_lines
from jaxrl.monitors.plot import draw_reward_curve, smooth


def test_the_curve_is_drawn_from_metrics_alone_and_shows_both_evaluations(tmp_path: Path) -> None:
    rows = [{"step": s, "rollout/reward/mean": s / 20} for s in range(1, 21)]
    append_lines(tmp_path / "metrics.jsonl", rows)
    without_evals = draw_reward_curve(tmp_path, "run")
    assert without_evals == tmp_path / "reward_curve.png"
    before = imread(without_evals)
    (tmp_path / "metrics.jsonl").unlink()
    append_lines(
        tmp_path / "metrics.jsonl", [{"step": 0, "eval/a/success_rate": 0.2}, *rows[:-1], {**rows[-1], "eval/a/success_rate": 0.9}]
    )
    draw_reward_curve(tmp_path, "run")
    after = imread(without_evals)
    assert before.shape == after.shape == (720, 1280, 4)
    # The evaluation's colour (#d9480f) is in the second picture only.
    orange = np.array([0xD9, 0x48, 0x0F]) / 255
    assert [int((np.abs(image[..., :3] - orange).max(-1) < 0.02).sum()) > 100 for image in (before, after)] == [False, True]


def test_there_is_no_picture_before_the_first_reward(tmp_path: Path) -> None:
    append_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/a/success_rate": 0.2}])
    assert draw_reward_curve(tmp_path, "run") is None
    assert not (tmp_path / "reward_curve.png").exists()


def test_smoothing_keeps_a_constant_and_weighs_by_distance() -> None:
    np.testing.assert_allclose(smooth(np.full(7, 0.3)), 0.3)
    # Half-life 1: weights 1, 1/2, 1/4 by distance.
    np.testing.assert_allclose(smooth(np.array([1.0, 0.0, 0.0]), halflife_steps=1.0), [1 / 1.75, 0.5 / 2, 0.25 / 1.75])
