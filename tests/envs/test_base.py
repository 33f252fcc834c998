"""What every environment's task list must be."""

import pytest

from jaxrl.envs.base import checked_tasks
from jaxrl.errors import ConfigError


@pytest.mark.parametrize("ids", [(1, "1"), (["b"], ["b"]), ("a", None), (True, "True")])
def test_two_tasks_whose_ids_read_alike_or_one_without_are_refused(ids: tuple[object, object]) -> None:
    with pytest.raises(ConfigError, match=r"every task needs an `id` of its own, got 1 ids for 2 tasks"):
        checked_tasks("sums", [{"id": name} for name in ids])


def test_ids_may_be_anything_that_reads_differently() -> None:
    tasks = [{"id": name} for name in ("a", ["b"], {"c": 1}, 1, "")]
    assert checked_tasks("sums", tasks) == tasks
    with pytest.raises(ConfigError, match="env 'sums' has no tasks"):
        checked_tasks("sums", [])


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", "half \ud800", {"deep": [float("inf")]}])
def test_a_task_that_no_checkpoint_could_hold_is_refused_before_the_run(value: object) -> None:
    with pytest.raises(ConfigError, match=r"env 'sums': task 1 \('b'\) is no JSON value: "):
        checked_tasks("sums", [{"id": "a"}, {"id": "b", "value": value}])
