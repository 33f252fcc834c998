"""Questions from Parquet files and from several files: the same tasks as from JSONL, and the same mistakes in words."""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from jaxrl.config.env import QuestionsEnvConfig
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.envs.questions import questions_environment
from jaxrl.errors import ConfigError


def parquet_of(folder: Path, rows: list[dict[str, Any]] | pyarrow.Table, name: str = "rows.parquet") -> Path:
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / name)
    return folder / name


def jsonl_of(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def tasks_of(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    return list(questions_environment(QuestionsEnvConfig(**({"path": str(path), "split": "all"} | settings))).tasks())


def test_a_parquet_file_gives_the_tasks_that_the_same_rows_give_as_jsonl_but_for_columns_that_are_null(tmp_path: Path) -> None:
    columns = {
        "question": ["2 + 2 =", "2 * 3 ="],
        "answer": [4, 6],
        "difficulty": [1, 2],
        "group": ["sums", None],
        "tests": [[[1.5, 2.0], []], None],
        "more": [{"deep": [None, True]}, None],
        "demonstration": [None, "so 6"],
    }
    rows = [{key: column[row] for key, column in columns.items() if column[row] is not None} for row in range(2)]
    from_parquet = tasks_of(parquet_of(tmp_path, pyarrow.table(columns)))
    assert from_parquet == tasks_of(jsonl_of(tmp_path, rows))
    first, second = from_parquet
    assert first["answer"] == "4" and first["difficulty"] == "1" and first["group"] == "sums" and first["tests"] == [[1.5, 2.0], []]
    assert "group" not in second and "tests" not in second and second["demonstration"] == "so 6"
    assert tasks_of(tmp_path / "rows.parquet", split="heldout", heldout_frac=0.999) == from_parquet


def test_rows_of_parquet_are_numbered_through_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.envs.rows.BATCH_ROWS", 2)
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(5)]
    assert [spec["answer"] for spec in tasks_of(parquet_of(tmp_path, rows))] == ["1", "2", "3", "4", "5"]
    with pytest.raises(ConfigError, match=r"rows 2 and 6 ask one question, '1 \+ 1 ='"):
        tasks_of(parquet_of(tmp_path, [*rows, rows[1]]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["a", "b"], "answer": ["1", None]}, r"row 2: no answer under 'answer' \(`answer_key`\); the row has \['question'\]"),
        ({"question": ["a"], "answer": [float("nan")]}, "row 1: what is under 'answer' has no place in JSON: .*not JSON compliant"),
        ({"question": ["a"], "answer": ["1"], "x": [[float("inf")]]}, "row 1: what is under 'x' has no place in JSON"),
        ({"question": ["a"], "answer": ["1"], "x": [b"\xff"]}, "row 1: what is under 'x' has no place in JSON: .*bytes.*write it as text"),
        ({"question": ["a"], "answer": ["1"], "x": [datetime.date(2020, 1, 1)]}, "under 'x' has no place in JSON: Object of type date"),
        ({"question": ["a"], "answer": [True]}, r"row 1: expected text or a number under 'answer' .*got true \(bool\)"),
        ({"question": [], "answer": []}, "the file has no rows"),
    ],
)
def test_what_json_cannot_hold_or_a_task_cannot_be_is_refused_by_its_row(tmp_path: Path, columns: dict[str, list], message: str) -> None:
    path = parquet_of(tmp_path, pyarrow.table(columns))
    with pytest.raises(ConfigError, match=message) as caught:
        tasks_of(path)
    assert "rows.parquet" in str(caught.value)


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.parquet': there is no such file$"):
        tasks_of(tmp_path / "none.parquet")
    jsonl_of(tmp_path, [{"question": "a", "answer": "1"}], "text.parquet")
    with pytest.raises(ConfigError, match=r"cannot read the file: .*its name ends in \.parquet, so it must be Parquet"):
        tasks_of(tmp_path / "text.parquet")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["question", "question"])
    with pytest.raises(ConfigError, match="two columns have one name; the columns are 'question', 'question'"):
        tasks_of(parquet_of(tmp_path, twice))


def test_without_pyarrow_a_parquet_file_says_what_to_install_and_jsonl_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet_of(tmp_path, [{"question": "a", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the package `pyarrow`, .*`pip install 'jaxrl\[parquet\]'`"):
        tasks_of(path)
    assert len(tasks_of(jsonl_of(tmp_path, [{"question": "a", "answer": "1"}]))) == 1


def test_several_files_are_read_in_the_order_of_their_names_and_of_either_kind(tmp_path: Path) -> None:
    jsonl_of(tmp_path, [{"question": "c", "answer": "3"}], "part-2.jsonl")
    parquet_of(tmp_path, [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}], "part-1.parquet")
    assert [spec["answer"] for spec in tasks_of(tmp_path / "part-*")] == ["1", "2", "3"]
    jsonl_of(tmp_path, [{"question": "d", "answer": "4"}, {"question": "b", "answer": "5"}], "part-3.jsonl")
    with pytest.raises(ConfigError, match=r"part-1\.parquet, row 2 and .*part-3\.jsonl, line 2 ask one question, 'b'"):
        tasks_of(tmp_path / "part-*")
    jsonl_of(tmp_path, [{"prompt": "d"}], "part-0.jsonl")
    with pytest.raises(ConfigError, match=r"part-0\.jsonl, line 1: no question under 'question'"):
        tasks_of(tmp_path / "part-*")
    with pytest.raises(ConfigError, match=r"no file matches it$"):
        tasks_of(tmp_path / "none-*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    assert len(tasks_of(jsonl_of(tmp_path, [{"question": "a", "answer": "1"}], "rows[1].jsonl"))) == 1


def test_the_columns_of_difficulty_and_group_may_have_other_names(tmp_path: Path) -> None:
    path = parquet_of(tmp_path, [{"question": "a", "level": 2.5, "family": 7}])
    [spec] = tasks_of(path, difficulty_key="level", group_key="family", reward=PythonRewardConfig(import_path="math:hypot"))
    assert (spec["difficulty"], spec["group"]) == ("2.5", "7") and set(spec) == {"id", "question", "difficulty", "group"}
    with pytest.raises(ConfigError, match=r"no row has a column 'kind' \(`group_key`\)"):
        tasks_of(path, group_key="kind", reward=PythonRewardConfig(import_path="math:hypot"))
