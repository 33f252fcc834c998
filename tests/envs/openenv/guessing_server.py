"""An OpenEnv server of a game of several steps that lists no tasks: what it is reset with is a seed alone (`num_tasks` of the environment).

It needs the package `openenv`, so it is served in an environment of its own (docs/testing.md). A number from 1 to 9 follows from the seed;
each guess is answered, and a right one ends the episode. Wrong guesses are not scored. `raise` raises, as an environment may.
"""

from typing import Any

from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    answer: str


class Hint(Observation):
    """What is said."""

    question: str


class Guessing(Environment):
    """Find the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def reset(self, seed: int | None = None, **more: Any) -> Hint:
        """Think of a number."""
        self._number = (seed or 0) % 9 + 1
        return Hint(question=f"Guess. ({sorted(more)})")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        """Answer a guess; only the right one is scored."""
        del timeout_s, more
        if action.answer == "raise":
            raise RuntimeError("no such guess")
        right = action.answer == str(self._number)
        return Hint(question="Wrong.", done=right, reward=1.0 if right else None, metadata={"service_spend": 1})

    @property
    def state(self) -> State:
        """Nothing."""
        return State(step_count=0)


app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=4)
