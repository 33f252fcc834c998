"""The first few tasks of several difficulties."""

from __future__ import annotations

from jaxrl.evals.in_turns import InTurns
from tests.eval_worlds import sums


def test_the_first_tasks_are_of_all_difficulties() -> None:
    env = InTurns(sums("sums", 6))
    assert [spec["id"] for spec in env.tasks()] == ["s0", "s3", "s1", "s4", "s2", "s5"]
    assert env.name == "sums" and env.demonstration(env.tasks()[0]) is None
