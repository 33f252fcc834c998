"""`jaxrl.monitors.selection`: the file of a step, and which of its rollouts are looked at."""

import logging
from pathlib import Path

import pytest

from jaxrl.errors import ConfigError
from jaxrl.monitors.jsonl import append_lines
from jaxrl.monitors.selection import chosen, rollout_file

ROWS = [
    {"id": index, "env": env, "reward": reward, "error": error, "messages": []}
    for index, (env, reward, error) in enumerate([("a", 0.5, None), ("b", 1.0, None), ("a", None, {"type": "E"}), ("a", 1.0, None)])
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (1, 2, 12):
        append_lines(tmp_path / "rollouts" / f"step_{step:06d}.jsonl", ROWS)
    (tmp_path / "rollouts" / "step_000013.jsonl.new").write_text("half")
    return tmp_path


def ids(path: Path, **options) -> list[int]:
    return [record["id"] for record in chosen(path, **options).records]


def test_the_newest_step_is_taken_unless_another_is_named(run_dir: Path) -> None:
    assert rollout_file(run_dir).name == "step_000012.jsonl"
    assert rollout_file(run_dir, 2).name == rollout_file(run_dir / "rollouts", 2).name == "step_000002.jsonl"
    file = run_dir / "rollouts" / "step_000001.jsonl"
    assert rollout_file(file) == file


def test_a_path_that_holds_no_rollouts_is_refused_with_what_to_do(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*missing`; give a run folder"):
        rollout_file(run_dir / "missing")
    with pytest.raises(ConfigError, match="has no rollouts of step 3; it has steps 1 to 12"):
        rollout_file(run_dir, 3)
    with pytest.raises(ConfigError, match="is a file, of one step"):
        rollout_file(run_dir / "rollouts" / "step_000001.jsonl", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"or `monitors\.rollouts` was false"):
        rollout_file(tmp_path / "empty")


def test_the_folder_of_an_evaluation_is_its_rows_and_a_task_of_it_is_found(tmp_path: Path) -> None:
    append_lines(tmp_path / "episodes.jsonl", [{"id": place, "task_id": task, "messages": []} for place, task in enumerate("abca")])
    path = rollout_file(tmp_path)
    assert path == tmp_path / "episodes.jsonl" and ids(path, task_id="a") == [0, 3]
    assert chosen(path, task_id="z").nothing(path) == f"of the 4 rollouts in `{path}`, none is of task 'z'; --step N shows another step"
    with pytest.raises(ConfigError, match="the folder of one evaluation"):
        rollout_file(tmp_path, 2)
    append_lines(tmp_path / "rollouts.jsonl", [{"id": 7, "task": {"id": "a"}, "messages": []}])
    assert ids(tmp_path / "rollouts.jsonl", task_id="a") == [7], "of a run"


def test_the_best_and_the_worst_are_sorted_by_reward_and_leave_out_what_has_none(run_dir: Path) -> None:
    path = rollout_file(run_dir)
    assert ids(path) == [0, 1, 2] and ids(path, num=9) == [0, 1, 2, 3]
    assert ids(path, order="best") == [1, 3, 0]
    assert ids(path, order="worst", num=2) == [0, 1]
    assert ids(path, order="errors") == [2]
    assert ids(path, order="best", env_name="a", num=1) == [3]


def test_the_title_says_what_is_shown_and_what_more_there_is(run_dir: Path) -> None:
    path = rollout_file(run_dir)
    assert chosen(path, num=2).title(path) == f"{path}: 2 of 4 rollouts, --num shows more"
    assert chosen(path, order="best", env_name="a").title(path) == f"{path}: 2 of 4 rollouts of env 'a', highest reward first"


def test_where_nothing_matches_the_reason_is_given(run_dir: Path) -> None:
    path = rollout_file(run_dir)
    assert "has no rollout of env 'c'; it has rollouts of 'a', 'b'" in chosen(path, env_name="c").nothing(path)
    words = chosen(path, order="errors", env_name="b").nothing(path)
    assert words.startswith("of the 4 rollouts in") and "none of env 'b' failed" in words
    path.write_text("")
    assert "holds no rollouts (yet)" in chosen(path).nothing(path)


def test_a_last_line_that_is_not_finished_is_left_out_with_a_word_and_a_broken_line_is_named(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rollout_file(run_dir)
    whole = path.read_bytes()
    path.write_bytes(whole + '{"id": 4, "text": "é'.encode()[:-1])
    with caplog.at_level(logging.WARNING):
        assert ids(path, num=9) == [0, 1, 2, 3]
    assert "the last line is incomplete" in caplog.text
    path.write_bytes(b"{\n" + whole)
    with pytest.raises(ValueError, match="line 1: not JSON"):
        chosen(path)
    path.write_bytes(whole + b'{"step": 3}\n')
    with pytest.raises(ValueError, match="line 5 is no rollout"):
        chosen(path)
