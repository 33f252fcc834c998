"""What tasks are told apart by."""

import logging
import math

import numpy as np
import pytest

from jaxrl.tasks import CurriculumSampler
from jaxrl.tasks.keys import keys_of


def test_one_and_one_point_zero_are_one_key_and_texts_are_keys_too() -> None:
    values = [1, 1.0, "1", 2.5, "easy", -3, 1e20, np.int64(1), np.float32(0.5)]
    tasks = [{"id": str(n), "difficulty": value} for n, value in enumerate(values)]
    assert keys_of(tasks, "difficulty").keys == ["1", "1", "1", "2.5", "easy", "-3", "100000000000000000000", "1", "0.5"]


@pytest.mark.parametrize("value", [True, math.nan, math.inf, [1], {}, ""])
def test_what_is_no_difficulty_is_refused_with_the_name_of_the_task(value: object) -> None:
    with pytest.raises(ValueError, match="`difficulty` of task 'odd' is"):
        keys_of([{"id": "fine", "difficulty": 1}, {"id": "odd", "difficulty": value}], "difficulty")
    with pytest.raises(ValueError, match="the key of task 'odd' is"):
        keys_of([{"id": "odd"}], lambda task: value)  # type: ignore[arg-type, return-value]


def test_a_list_without_the_key_falls_back_to_the_next_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    grouped = [{"id": "a", "group": "x"}, {"id": "b", "group": "x", "difficulty": None}]
    bare = [{"id": "a"}, {"id": "b"}]
    with caplog.at_level(logging.WARNING):
        assert keys_of(grouped, "difficulty") == ("group", ["x", "x"])
        assert caplog.messages == ["no task has a `difficulty`: tasks are told apart by `group`"]
        assert keys_of(bare, "group") == ("id", ["a", "b"])
        assert keys_of(["q", 7], "id").name == "id"
    assert caplog.messages[1:] == ["no task has a `group`: tasks are told apart by `id`"]
    caplog.clear()
    sampler = CurriculumSampler(bare, 8)
    sampler.sample(50)
    assert caplog.messages == ["no task has a `difficulty` or a `group`: tasks are told apart by `id`"]
    assert sampler.state_dict()["key"] == "id"


def test_many_tasks_of_one_kind_are_no_curriculum_which_is_said_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [{"id": name, "difficulty": "all"} for name in "abc"]
    assert sorted(task["id"] for task in CurriculumSampler(tasks, 8).sample(3)) == ["a", "b", "c"]
    (message,) = caplog.messages
    assert message.startswith("all 3 tasks are of one kind, difficulty 'all'") and "`tiers`" in message and '`tasks.key` = "id"' in message
    CurriculumSampler(tasks[:1], 8)
    CurriculumSampler(tasks, 8, key="id")
    CurriculumSampler([*tasks, {"id": "d", "difficulty": "hard"}], 8)
    assert len(caplog.messages) == 1


def test_tiers_and_single_tasks_are_not_mixed_in_one_table() -> None:
    tasks = [{"id": "a", "difficulty": 1}, *({"id": name} for name in "bcdef")]
    with pytest.raises(ValueError, match=r"5 of 6 tasks have no `difficulty` \('b', 'c', 'd', \.\.\.\)"):
        keys_of(tasks, "difficulty")
    assert keys_of(tasks, "id").keys == list("abcdef")
    assert keys_of(tasks, lambda task: len(task)) == ("function", ["2", "1", "1", "1", "1", "1"])
