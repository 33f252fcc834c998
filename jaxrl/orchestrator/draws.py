"""Which environment and which task the next group plays: the run's one source of draws.

In: the environments with their ratios and task samplers, and a seed. Out: draws, the same ones after a restart. Nothing
here plays, waits, or knows whether a draw is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.tasking import draw_task, sampler_state
from jaxrl.tasks.randomness import share_at


class Draw(NamedTuple):
    """One task picked for one group: enough to play it again after a restart."""

    env_name: str
    spec: Any
    """The task, as the environment's task sampler handed it out."""
    draw_index: int
    """Which draw of its environment it is; part of the sampling key, so a task drawn again is sampled anew."""
    is_counted: bool = False
    """True if its task sampler has learnt from a group of this draw already, in an earlier process that did not come to train on it:
    what is played again is no further result of its task."""


def pick_index(ratios: Sequence[float], seed: int, num_draws: int) -> int:
    """Return which of several shares draw number `num_draws` falls to.

    Counter-based: the answer depends on (seed, num_draws) alone, so the count is the whole state of the generator.

    Args:
      ratios: one positive weight per share.
      seed: `run.seed`.
      num_draws: draws before this one.

    Returns:
      An index into `ratios`, with probability proportional to its ratio.

    Example:
      >>> picks = [pick_index([3.0, 1.0], seed=0, num_draws=n) for n in range(400)]
      >>> 0.7 < picks.count(0) / 400 < 0.8
      True
    """
    return share_at(ratios, np.random.default_rng(np.random.SeedSequence([seed, num_draws])).random())


class DrawSource:
    """Draws an environment by its ratio, then a task from that environment's sampler."""

    def __init__(self, envs: Sequence[TrainEnv], seed: int) -> None:
        self._envs = {env.name: env for env in envs}
        self._ratios = [env.ratio for env in envs]
        self._seed = seed
        self._num_draws = 0
        self._draw_indices = dict.fromkeys(self._envs, 0)
        self._again: deque[Draw] = deque()

    @property
    def to_redraw(self) -> list[Draw]:
        """Draws of an earlier process that have not been handed out again yet."""
        return list(self._again)

    def draw(self) -> Draw:
        """Return the next draw; draws to be repeated come first, as they were.

        Raises:
          RunFailedError: the task sampler failed, or has no task left.
        """
        if self._again:
            return self._again.popleft()
        env = list(self._envs.values())[pick_index(self._ratios, self._seed, self._num_draws)]
        draw = Draw(env.name, draw_task(env), self._draw_indices[env.name])
        self._num_draws += 1
        self._draw_indices[env.name] += 1
        return draw

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the task samplers' states, as a JSON object."""
        envs = {
            name: {"num_draws": self._draw_indices[name], "tasks": sampler_state(name, env.tasks), "cost": env.cost}
            for name, env in self._envs.items()
        }
        return {"num_draws": self._num_draws, "envs": envs}

    def load_state_dict(self, state: dict[str, Any], again: Iterable[Draw]) -> None:
        """Restore a state.

        Args:
          state: from `state_dict`.
          again: draws to be handed out once more, in their order, before any new one.

        Raises:
          ValueError: the state is of other environments, of other tasks or of another cost.
        """
        if set(state["envs"]) != set(self._envs):
            raise ValueError(
                f"the state is of the environments {sorted(state['envs'])}, but the run has {sorted(self._envs)}"
            )
        for name, env in self._envs.items():
            saved = state["envs"][name]
            counted = saved.get("cost", env.cost)
            if counted != env.cost:
                raise ValueError(f"environment {name!r}: its costs were counted in {counted!r} so far, but `tasks.cost`={env.cost!r}")
            try:
                env.tasks.load_state_dict(saved["tasks"])
            except Exception as error:
                # A sampler may be the user's own, and raise what it likes.
                kind = "" if isinstance(error, ValueError) else f"its task sampler raised {type(error).__name__}: "
                raise ValueError(f"environment {name!r}: {kind}{error}") from error
            self._draw_indices[name] = int(saved["num_draws"])
        self._num_draws = int(state["num_draws"])
        self._again = deque(again)
