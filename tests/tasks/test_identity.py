"""What makes two tasks the same."""

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
