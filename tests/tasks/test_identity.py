"""What makes two tasks the same."""

import pytest

from jaxrl.config.tasks import CurriculumTasksConfig, PoolsTasksConfig, TasksConfig, UniformTasksConfig
from jaxrl.errors import ConfigError
from jaxrl.tasks import build_task_sampler
from jaxrl.tasks.identity import fingerprint, task_id


def test_an_id_names_a_task_and_content_does_where_there_is_none() -> None:
    assert task_id({"id": "a", "x": 1}) == task_id({"id": "a", "x": 2}) == "a"
    assert task_id({"id": 7}) == "7"
    assert task_id({"x": 1, "y": 2}) == task_id({"y": 2, "x": 1}) != task_id({"x": 1, "y": 3})
    assert len({task_id(value) for value in (0, "0", [0], {}, None, 0.5, "é")}) == 7


def test_a_fingerprint_is_of_content_and_order() -> None:
    tasks = [{"id": "a", "x": 1}, {"id": "b"}]
    assert fingerprint(tasks) == fingerprint([dict(reversed(list(tasks[0].items()))), tasks[1]])
    assert len({fingerprint(tasks), fingerprint(tasks[::-1]), fingerprint([{"id": "a", "x": 2}, tasks[1]])}) == 3


@pytest.mark.parametrize(
    "config", [UniformTasksConfig(), CurriculumTasksConfig(key="id"), PoolsTasksConfig()], ids=lambda config: config.type
)
def test_half_of_a_surrogate_pair_is_a_character_like_others_and_what_is_no_json_is_refused(config: TasksConfig) -> None:
    odd = [{"id": "\ud800", "question": "\ud83d\n\u2028"}, {"question": "\udc00"}]
    sampler = build_task_sampler(config, odd, 0, group_size=2)
    for task in odd:
        sampler.update(task, [1.0, 0.0])
    assert sampler.metrics()["groups"] == 2
    for wrong in (float("nan"), {1, 2}, {1: "a", "b": 2}, b"bytes"):
        with pytest.raises(ConfigError, match="a task must be a JSON value"):
            build_task_sampler(config, [{"id": "a", "x": wrong}], 0, group_size=2)
