"""Worlds for tests of `jaxrl eval`, found by import path: one that ignores what it is given, and one that breaks."""

from __future__ import annotations

import itertools

from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.envs.single_turn import SingleTurnEnvironment


def sums(name: str, num_tasks: int = 12) -> SingleTurnEnvironment:
    """Ask a + a, with a difficulty for the small and one for the large."""
    tasks = [{"id": f"s{a}", "a": a, "difficulty": "small" if a < num_tasks // 2 else "large"} for a in range(num_tasks)]
    return SingleTurnEnvironment(
        name, tasks, prompt=lambda spec: f"{spec['a']} + {spec['a']} =", score=lambda spec, text: float(text.strip() == str(2 * spec["a"]))
    )


def restless(name: str) -> SingleTurnEnvironment:
    """Ask something else whenever it is asked to."""
    numbers = itertools.count()
    tasks: list[TaskSpec] = [{"id": "only"}, {"id": "other"}]
    return SingleTurnEnvironment(name, tasks, prompt=lambda spec: f"{next(numbers)} + 1 =", score=lambda spec, text: 1.0)


class _Broken(SingleTurnEnvironment):
    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        await session.ask([{"role": "user", "content": "1 + 1 ="}])
        raise RuntimeError("the board fell over")


def broken(name: str) -> SingleTurnEnvironment:
    """Raise after the first reply."""
    return _Broken(name, [{"id": "a"}], prompt=lambda spec: "", score=lambda spec, text: 0.0)
