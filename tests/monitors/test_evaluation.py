"""An evaluation on a terminal: the bar, the tables, the picture."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxrl.evals.scores import score_rows
from jaxrl.monitors.evaluation import EvalTerminal, print_scores
from jaxrl.monitors.plot import draw_success_by_difficulty


def row(task: str, reward: float | None, *, difficulty: str = "easy", error: str | None = None, **more: Any) -> dict[str, Any]:
    failure = None if error is None else {"stage": "env", "type": error, "message": f"{error} of {task}"}
    status = "error" if error else "unscored" if reward is None else "ok"
    return {
        "task_id": task, "difficulty": difficulty, "group": "sums", "status": status, "reward": reward, "error": failure, "sample": 0,
        "completion_tokens": 10, "turns": 2, "is_truncated": False, "version": 0, "token_versions": [0], "metrics": {"calls": 1.5}, **more,
    }  # fmt: skip


ROWS = [
    row("a", 1.0), row("b", 1.0), row("c", 0.0, difficulty="hard"), row("d", None), row("e", None, error="Broken"),
    row("f", None, error="Broken"), row("g", None, error="Late"),
]  # fmt: skip


def printed(rows: list[dict[str, Any]], **more: Any) -> str:
    out = io.StringIO()
    print_scores(Console(file=out, width=100), score_rows(rows, 1.0) | more, rows, title="[sums]: toy")
    return out.getvalue()


def test_of_many_samples_the_table_has_the_powers_of_two_and_the_last() -> None:
    rows = [row("a", 1.0, sample=sample) for sample in range(11)]
    (line,) = [line for line in printed(rows).splitlines() if line.startswith("pass@k")]
    assert [word for word in line.split() if word.endswith(":")] == ["1:", "2:", "4:", "8:", "11:"]


def test_the_table_tells_scores_counts_kinds_and_what_failed_first() -> None:
    probes = [
        {"kind": "same_task", "tasks": ["a"], "passed": False, "detail": "'1' and then '2'"},
        {"kind": "different_tasks", "tasks": ["a", "b"], "passed": False, "detail": "all begin with '1'"},
    ]
    lines = [" ".join(line.split()) for line in printed(ROWS, reproducible=False, probes=probes).splitlines()]
    assert lines[0] == "[sums]: toy"
    for expected in (
        "success rate 66.7 % ± 27.2 % (standard error)",  # sqrt(2/3 · 1/3 / 3)
        "... of all planned 28.6 %",
        "mean reward 0.667",
        "episodes 3 of 7 scored, 3 failed, 1 not scored",
        "generated tokens 70 (10.0 per episode)",
        "turns 2.00 per episode",
        "calls 1.5",
        "reproducible no",
        "same task '1' and then '2'",
        "different tasks all begin with '1'",
        "easy 100.0 % ± 0.0 % 1.000 6 2",
        "hard 0.0 % ± 0.0 % 0.000 1 1",
        "env 2 Broken: Broken of e",
        "env 1 Late: Late of g",
    ):
        assert expected in lines
    assert not any(line.startswith("group ") for line in lines), "one group is no table"


def test_what_there_is_no_number_for_is_left_out() -> None:
    text = printed([row("a", None, error="Broken")])
    assert "success rate" not in text and "0 of 1 scored, 1 failed" in text and "reproducible" not in text
    assert "not told by the server" in printed([row("a", 1.0, completion_tokens=None)])


def test_a_person_sees_a_bar_and_warnings_above_it_and_a_log_lines() -> None:
    out, log = io.StringIO(), io.StringIO()
    for console in (Console(file=out, force_terminal=True, width=80), Console(file=log, width=80)):
        terminal = EvalTerminal(console)
        with terminal.shown():
            terminal.phase("loading the weights")
            terminal.progress(0, 3)
            logging.getLogger(__name__).warning("something is odd")
            terminal.progress(3, 3)
    assert "playing" in out.getvalue() and "3/3" in out.getvalue()
    assert log.getvalue() == "loading the weights\n3 of 3 episodes\n"


def test_the_picture_needs_two_difficulties(tmp_path: Path) -> None:
    scores = score_rows(ROWS, 1.0)
    assert draw_success_by_difficulty(scores, tmp_path / "two.png", "sums") and (tmp_path / "two.png").stat().st_size > 1000
    assert not draw_success_by_difficulty(score_rows(ROWS[:2], 1.0), tmp_path / "one.png", "sums")
    assert not (tmp_path / "one.png").exists()
