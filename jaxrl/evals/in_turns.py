"""Tasks of several difficulties in turn, so that the first few of a list are of all of them.

In: an environment. Out: the same one, with its tasks in another order. It plays nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.envs.base import Demonstration, Environment, Outcome, Session, TaskSpec


class InTurns:
    """An environment whose tasks come from each difficulty in turn, so that the first few are of all of them.

    Args:
      env: whose tasks these are; in everything else this is it.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.name = env.name
        self._tasks = _in_turns(env.tasks())

    def tasks(self) -> Sequence[TaskSpec]:
        """See `Environment.tasks`."""
        return self._tasks

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        """See `Environment.play`."""
        return await self._env.play(spec, session)

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """See `Environment.demonstration`."""
        return self._env.demonstration(spec)

    def close(self) -> None:
        """See `Environment.close`."""
        self._env.close()


def _in_turns(tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """Return the first task of each difficulty, then the second of each, and so on.

    Example:
      >>> [t["id"] for t in _in_turns([{"id": i, "difficulty": d} for i, d in (("a", 1), ("b", 1), ("c", 2), ("d", 3))])]
      ['a', 'c', 'd', 'b']
    """
    kinds: dict[str, list[TaskSpec]] = {}
    for task in tasks:
        kinds.setdefault(str(task.get("difficulty")), []).append(task)
    longest = max(map(len, kinds.values()), default=0)
    return [kind[place] for place in range(longest) for kind in kinds.values() if place < len(kind)]
