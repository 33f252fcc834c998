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


class Draw(NamedTuple):
    """One task picked for one group: enough to play it again after a restart."""

    env_name: str
    spec: Any
    """The task, as the environment's task sampler handed it out."""
    draw_index: int
    """Which draw of its environment it is; part of the sampling key, so a task drawn again is sampled anew."""


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
    bounds = np.cumsum(np.asarray(ratios, np.float64))
    point = np.random.default_rng(np.random.SeedSequence([seed, num_draws])).random() * bounds[-1]
    return min(int(np.searchsorted(bounds, point, side="right")), len(ratios) - 1)


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
        """Return the next draw; draws to be repeated come first, as they were."""
        if self._again:
            return self._again.popleft()
        env = list(self._envs.values())[pick_index(self._ratios, self._seed, self._num_draws)]
        draw = Draw(env.name, next(env.tasks), self._draw_indices[env.name])
        self._num_draws += 1
        self._draw_indices[env.name] += 1
        return draw

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the task samplers' states, as a JSON object."""
        envs = {
            name: {"num_draws": self._draw_indices[name], "tasks": env.tasks.state_dict()}
            for name, env in self._envs.items()
        }
        return {"num_draws": self._num_draws, "envs": envs}

    def load_state_dict(self, state: dict[str, Any], again: Iterable[Draw]) -> None:
        """Restore a state.

        Args:
          state: from `state_dict`.
          again: draws to be handed out once more, in their order, before any new one.

        Raises:
          ValueError: the state is of other environments or of other tasks.
        """
        if set(state["envs"]) != set(self._envs):
            raise ValueError(
                f"the state is of the environments {sorted(state['envs'])}, but the run has {sorted(self._envs)}"
            )
        for name, env in self._envs.items():
            try:
                env.tasks.load_state_dict(state["envs"][name]["tasks"])
            except ValueError as error:
                raise ValueError(f"environment {name!r}: {error}") from error
            self._draw_indices[name] = int(state["envs"][name]["num_draws"])
        self._num_draws = int(state["num_draws"])
        self._again = deque(again)
