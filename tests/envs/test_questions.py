"""Questions from a file of the user's: which there are, what is shown of them, and what is refused by file and line."""

import json
import logging
from pathlib import Path

import pytest

from jaxrl.config.env import QuestionsEnvConfig
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.envs.build import build_environment, require_disjoint_questions
from jaxrl.envs.play import play_rollout
from jaxrl.envs.questions import questions_environment
from jaxrl.envs.splits import split_of
from jaxrl.errors import ConfigError
from tests.envs.policies import make_rollout, open_session, saying

ROW = {"question": "2 + 2 =", "answer": "4"}


def file_of(folder: Path, *rows: dict | str) -> str:
    """Write a file of the rows, and of texts as they are, and return its path."""
    path = folder / "questions.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(folder: Path, *rows: dict | str, **options) -> QuestionsEnvConfig:  # type: ignore[no-untyped-def]
    return QuestionsEnvConfig(**({"path": file_of(folder, *rows), "split": "all"} | options))


async def test_the_question_alone_is_asked_and_the_reply_is_compared_with_the_answer(tmp_path: Path) -> None:
    env = build_environment(questions(tmp_path, ROW | {"demonstration": "<think>two and two</think>4", "hint": "even"}, name="sums"))
    [spec] = env.tasks()
    rewards = []
    for reply in ("<think>hm</think>4", "4", "5", env.demonstration(spec)):
        rollout = make_rollout(spec)
        await play_rollout(env, rollout, open_session(saying(reply), rollout), 10.0)
        assert rollout.failure is None and [node.content for node in rollout.nodes] == ["2 + 2 =", reply]
        rewards.append(rollout.reward)
    assert env.name == "sums" and rewards == [1.0, 1.0, 0.0, 1.0]


def test_rows_become_specs_with_the_columns_under_fixed_names_and_the_others_under_their_own(tmp_path: Path) -> None:
    row = {"problem": "1 + 1 =", "solution": 2, "worked": "1, 2", "key": 7, "level": 3, "tests": [[1, 2]]}
    keys = {"question_key": "problem", "answer_key": "solution", "demonstration_key": "worked", "id_key": "key", "difficulty_key": "level"}
    env = questions_environment(questions(tmp_path, "\ufeff", row, "\n", "  \n", **keys))
    named = {"id": "7", "question": "1 + 1 =", "answer": "2", "demonstration": "1, 2", "difficulty": "3"}
    assert env.tasks() == [named | {"tests": [[1, 2]]}]


def test_a_number_under_a_fixed_name_is_the_text_that_it_is_written_as(tmp_path: Path) -> None:
    rows = ['{"question": 1.50, "answer": 0.10, "id": 1E5, "weight": 0.10}\n', '{"question": "b", "answer": 123456789012345678901234.5}\n']
    first, second = questions_environment(questions(tmp_path, *rows)).tasks()
    assert first == {"id": "1E5", "question": "1.50", "answer": "0.10", "weight": 0.1}
    assert second["answer"] == "123456789012345678901234.5"


def test_a_row_has_a_demonstration_only_if_it_says_so_or_its_answer_is_one(tmp_path: Path) -> None:
    plain, own = questions(tmp_path, ROW), questions(tmp_path, ROW, demonstration_key="answer")
    for config, expected in ((plain, None), (own, "4")):
        env = questions_environment(config)
        assert env.demonstration(env.tasks()[0]) == expected and env.tasks()[0]["answer"] == "4"


def test_rows_without_a_name_are_named_by_their_question_and_texts_may_hold_line_separators(tmp_path: Path) -> None:
    rows = [{"question": f"say {c!r}: {c}", "answer": f"it is {c}."} for c in ("\u2028", "\x85", "\x0c", "ü")]
    specs = questions_environment(questions(tmp_path, *rows)).tasks()
    again = questions_environment(questions(tmp_path, *reversed(rows))).tasks()
    assert [spec["answer"] for spec in specs] == ["it is \u2028.", "it is \x85.", "it is \x0c.", "it is ü."]
    assert [spec["id"] for spec in specs] == [spec["id"] for spec in reversed(again)] and len({spec["id"] for spec in specs}) == 4


def test_train_and_heldout_part_the_questions_by_their_text_as_other_environments_do(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1 =", "answer": i + 1} for i in range(200)]
    train, heldout = (questions_environment(questions(tmp_path, *rows, split=split, heldout_frac=0.25)) for split in ("train", "heldout"))
    texts = {row["question"] for row in rows}
    assert {spec["question"] for spec in heldout.tasks()} == {text for text in texts if split_of(text, 0.25) == "heldout"}
    assert len(train.tasks()) + len(heldout.tasks()) == 200 and 25 < len(heldout.tasks()) < 75
    require_disjoint_questions([train], [heldout])
    with pytest.raises(ConfigError, match=r"none of its 200 questions is in split 'heldout' with `heldout_frac`=0.0"):
        questions_environment(questions(tmp_path, *rows, split="heldout", heldout_frac=0.0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the file has no rows"),
        ([ROW, "\n", '{"question": "a"\n'], r"line 3: not JSON \(Expecting .*expected one object a line"),
        ([ROW, '{"question": "a", "answer": NaN}\n'], "line 2: not JSON .NaN is no JSON number"),
        ([ROW, '["a", "4"]\n'], r'line 2: expected a JSON object, got \["a", "4"\] \(list\)'),
        ([ROW, {"prompt": "a", "answer": "4"}], r"line 2: no question under 'question' .*; the row has \['answer', 'prompt'\]"),
        ([ROW, {"question": "  ", "answer": "4"}], "line 2: no question under 'question'"),
        ([{"question": "a", "solution": "4"}], r"line 1: no answer under 'answer' \(`answer_key`\)"),
        ([{"question": ["a"], "answer": "4"}], r'line 1: expected text or a number under .question. .*, got \["a"\] \(list\)'),
        ([{"question": "a", "answer": True}], r"line 1: expected text or a number under 'answer' .*got true \(bool\)"),
        (['{"question": "\\ud800", "answer": "4"}\n'], "line 1: what is under 'question' is no Unicode text"),
        ([ROW, '{"question": "a", "answer": "4", "tests": ["\\ud800"]}\n'], "line 2: what is under 'tests' is no Unicode text"),
        ([ROW, '{"question": "a", "answer": "4", "tests": [1e400]}\n'], "line 2: not JSON .1e400 is larger than any number"),
        ([ROW, {"question": "a", "answer": " "}], "line 2: no answer under 'answer'"),
        ([ROW | {"id": 1}, {"question": "b", "answer": "b", "id": "1"}], "lines 1 and 2 have one name, '1'; .*under 'id' .`id_key`"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        questions_environment(questions(tmp_path, *rows))
    assert "questions.jsonl" in str(caught.value) and "env 'questions'" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl': there is no such file$"):
        questions_environment(QuestionsEnvConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match=f"there is no such file; paths are seen from where the run is started, which is '{Path.cwd()}'"):
        questions_environment(QuestionsEnvConfig(path="data/none.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes('{"question": "grün", "answer": "a"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot read the file: .*it must be text in UTF-8"):
        questions_environment(QuestionsEnvConfig(path=str(tmp_path / "latin.jsonl")))


def test_rows_that_are_one_task_are_listed_by_their_lines_the_first_three_pairs_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lines 1 and 2 ask one question, '2 \+ 2 ='; remove one of each pair, or give every row a name"):
        questions_environment(questions(tmp_path, ROW, ROW | {"answer": "5"}))
    rows = [ROW, *({"question": f"{i // 2} + 1 =", "answer": "?"} for i in range(8)), ROW]
    with pytest.raises(ConfigError, match=r"lines 2 and 3 .*, lines 4 and 5 .*, lines 6 and 7 .*, and 2 more such pair") as caught:
        questions_environment(questions(tmp_path, *rows))
    assert "lines 8" not in str(caught.value)


def test_a_key_that_names_no_column_is_refused_with_the_columns_that_there_are(tmp_path: Path) -> None:
    message = r"no row has a column 'demo' \(`demonstration_key`\); the columns are 'question', 'answer', 'hint'$"
    with pytest.raises(ConfigError, match=message):
        questions_environment(questions(tmp_path, ROW, {"question": "a", "answer": "b", "hint": "c"}, demonstration_key="demo"))
    some = questions_environment(questions(tmp_path, ROW, {"question": "a", "answer": "b", "demo": "c"}, demonstration_key="demo"))
    assert list(map(some.demonstration, some.tasks())) == [None, "c"]


def test_the_key_of_the_demonstration_chooses_among_several_and_the_column_of_that_name_may_stay_in_the_file(tmp_path: Path) -> None:
    row = ROW | {"demonstration": "<think>two and two</think>4", "short": "so 4"}
    for key, shown in (("demonstration", row["demonstration"]), ("answer", "4"), ("short", "so 4")):
        env = questions_environment(questions(tmp_path, row, demonstration_key=key))
        [spec] = env.tasks()
        assert env.demonstration(spec) == spec["demonstration"] == shown and spec["answer"] == "4", key


def test_two_rows_with_names_of_their_own_may_ask_one_question(tmp_path: Path) -> None:
    assert len(questions_environment(questions(tmp_path, ROW | {"id": "a"}, ROW | {"id": "b"})).tasks()) == 2


def test_a_column_that_would_take_a_fixed_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: `answer_key`='solution' makes that column the task's 'answer', and another"):
        questions_environment(questions(tmp_path, ROW | {"solution": "4"}, answer_key="solution"))


def test_only_a_reward_of_the_users_own_does_without_answers(tmp_path: Path) -> None:
    reward = PythonRewardConfig(import_path="math:hypot")
    assert questions_environment(questions(tmp_path, {"question": "write a poem"}, reward=reward)).tasks()[0].keys() == {"id", "question"}


def test_how_much_of_the_file_is_asked_is_said_and_warned_of_where_nobody_chose_a_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"{i} + 1 =", "answer": i + 1} for i in range(100)]
    path = file_of(tmp_path, *rows)
    caplog.set_level(logging.INFO, "jaxrl.envs.questions")
    num_heldout = sum(split_of(row["question"], 0.1) == "heldout" for row in rows)
    questions_environment(QuestionsEnvConfig(path=path, name="x"))
    questions_environment(QuestionsEnvConfig(path=path, name="x", split="heldout"))
    questions_environment(QuestionsEnvConfig(path=path, name="x", split="all", num_tasks=5))
    questions_environment(QuestionsEnvConfig(path=path, name="x", heldout_frac=0.0))
    train = f"env 'x': {100 - num_heldout} of 100 questions (split 'train'; `heldout_frac`=0.1 keeps {num_heldout} for 'heldout')"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{train}; `split` = 'all' takes the whole file"),
        ("INFO", f"env 'x': {num_heldout} of 100 questions (split 'heldout'; `heldout_frac`=0.1 keeps {100 - num_heldout} for 'train')"),
        ("INFO", "env 'x': 100 of 100 questions (split 'all'); `num_tasks`=5 takes the first of them"),
        ("INFO", "env 'x': 100 of 100 questions (split 'train'; `heldout_frac`=0 keeps 0 for 'heldout')"),
    ]


def test_a_number_of_tasks_takes_the_first_ones_of_the_split(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1 =", "answer": i + 1} for i in range(40)]
    whole, first = (questions_environment(questions(tmp_path, *rows, split="train", num_tasks=num)).tasks() for num in (None, 3))
    assert first == whole[:3] and len(whole) > 20
    assert questions_environment(questions(tmp_path, *rows, split="train", num_tasks=1000)).tasks() == whole
