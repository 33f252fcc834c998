"""`jaxrl.monitors.jsonl`: one row per step, in order, on disk at once."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.monitors.jsonl import MetricsFile, append_compact_lines, append_lines, read_lines, to_json


def test_a_row_is_on_disk_before_the_next_call(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    file.log(1, {"loss/total": 0.5})
    assert read_lines(tmp_path / "deep" / "metrics.jsonl") == [{"step": 1, "loss/total": 0.5}]
    file.close()
    file.close()


def test_numbers_that_are_not_finite_are_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        file.log(3, {"a": math.nan, "b": math.inf, "c": np.float32(0.25)})
    file.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 3, "c": 0.25}]
    assert "step 3" in caplog.text and "a, b" in caplog.text


def test_values_that_come_late_join_their_steps_row_and_rows_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(1, {"reward": 0.1})
    file.log(2, {"reward": 0.2})
    file.log(1, {"eval/x/success_rate": 0.5})
    file.log(0, {"eval/x/success_rate": 0.4})
    file.log(3, {"eval/x/success_rate": 0.6})
    file.log(3, {"reward": 0.3})
    file.close()
    assert read_lines(path) == [
        {"step": 0, "eval/x/success_rate": 0.4},
        {"step": 1, "reward": 0.1, "eval/x/success_rate": 0.5},
        {"step": 2, "reward": 0.2},
        {"step": 3, "eval/x/success_rate": 0.6, "reward": 0.3},
    ]


def test_resuming_keeps_the_rows_up_to_the_checkpoint_and_drops_the_rest_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}}}\n' for s in range(5)) + '{"step": 5, "re')
    file = MetricsFile(path, resume_step=2)
    file.log(3, {"reward": 1.0})
    file.close()
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 3]


def test_a_new_run_begins_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    MetricsFile(tmp_path / "metrics.jsonl").close()
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_folder_that_cannot_be_written_stops_the_run_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")


def test_damage_inside_the_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_lines(tmp_path / "metrics.jsonl")


def test_odd_values_become_json(tmp_path: Path) -> None:
    value = {"array": np.arange(2, dtype=np.int32), "nan": np.float32("nan"), 3: (1, {2}), "path": Path("x"), "é": True, "none": None}
    assert json.loads(to_json(value)) == {"array": [0, 1], "nan": None, "3": [1, [2]], "path": "x", "é": True, "none": None}
    append_lines(tmp_path / "a" / "b.jsonl", [{"text": "two\nlines"}])
    append_lines(tmp_path / "a" / "b.jsonl", [{"text": "\u2028 \x85 \ud800"}])
    assert read_lines(tmp_path / "a" / "b.jsonl") == [{"text": "two\nlines"}, {"text": "\u2028 \x85 \ud800"}]
    assert len((tmp_path / "a" / "b.jsonl").read_text().splitlines()) == 2


def test_a_late_value_that_cannot_be_written_costs_itself_and_no_later_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(1, {"reward": 0.1})
    (tmp_path / "metrics.jsonl.new").mkdir()  # as good as a full disk
    with pytest.raises(OSError):
        file.log(1, {"eval/x/success_rate": 0.5})
    file.log(2, {"reward": 0.2})
    file.close()
    assert [row["step"] for row in read_lines(path)] == [1, 2]


def test_a_file_that_somebody_deleted_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(1, {"reward": 0.1})
    path.unlink()
    file.log(2, {"reward": 0.2})
    file.log(3, {"reward": 0.3})
    file.close()
    assert [row["step"] for row in read_lines(path)] == [2, 3]


def test_compact_lines_read_back_as_the_others_do_whatever_they_hold(tmp_path: Path) -> None:
    values: list[dict] = [{"a": [1, 0.5, None]}, {"text": "line\u2028end\x85"}, {"text": "\ud800"}]
    values += [{"a": math.nan}, {"a": np.float32(0.5)}, {"a": 2**70}]
    append_lines(tmp_path / "slow.jsonl", values)
    append_compact_lines(tmp_path / "deep" / "fast.jsonl", values)
    text = (tmp_path / "deep" / "fast.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == len(values) and text.startswith('{"a":[1,0.5,null]}\n')
    assert read_lines(tmp_path / "deep" / "fast.jsonl") == read_lines(tmp_path / "slow.jsonl")


def test_what_cannot_be_written_costs_its_own_key_of_an_object_and_no_other(tmp_path: Path) -> None:
    circle: dict = {}
    circle["me"] = circle
    append_compact_lines(tmp_path / "x.jsonl", [{"a": 1}, {"a": {1, 2}, "info": circle, "big": 10**5000}, {"a": 3}])
    first, odd, last = read_lines(tmp_path / "x.jsonl")
    assert (first, odd["a"], last) == ({"a": 1}, [1, 2], {"a": 3})
    assert odd["info"] == "cannot be written: RecursionError" and odd["big"] == "cannot be written: ValueError"


def test_a_name_with_half_of_a_surrogate_pair_costs_no_row(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(2, {"tasks/toy/key/\ud83d/prob": 0.5})
    file.log(1, {"loss/total": 1.0})
    file.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss/total": 1.0}, {"step": 2, "tasks/toy/key/\ud83d/prob": 0.5}]
