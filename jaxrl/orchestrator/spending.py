"""What training had taken by each policy version: episodes, and what they cost, so that a score can be read against them.

In: the task samplers, asked whenever a step is shipped. Out: totals over the training environments. Nothing here decides or counts
anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.tasking import sampler_metrics

EPISODES, COST = "training_episodes", "training_cost"


class Spending:
    """Totals of the run's task samplers, as they stood when each step was shipped.

    A later question would be answered too high where generation runs ahead of training.

    Args:
      envs: the training environments.
    """

    def __init__(self, envs: Sequence[TrainEnv]) -> None:
        self._envs = envs
        self._has_one_unit = len({env.cost for env in envs}) == 1
        self._at: dict[int, dict[str, float]] = {}

    def note(self, step: int) -> None:
        """Remember the totals as those of a step, which is being shipped; raises what a task sampler that fails raises."""
        self._at[step] = self._now()

    def at(self, version: int) -> dict[str, float]:
        """Return the totals of the steps up to a version, and forget those of earlier ones.

        Args:
          version: the policy version that is measured; asked in ascending order.

        Returns:
          `training_episodes`: rollouts of the groups that task samplers were told of. `training_cost`: what those cost; absent if the
          environments count it in different units, or a task sampler does not report it.
        """
        self._at = {step: totals for step, totals in self._at.items() if step >= version}
        # Nothing is noted of the version that a run starts from, and then nothing was drawn since.
        return self._at.get(version) or self._now()

    def _now(self) -> dict[str, float]:
        reported = [sampler_metrics(env) for env in self._envs]
        totals = {EPISODES: sum(metrics.get("episodes", 0.0) for metrics in reported)}
        # A sampler that was told of no group yet has no cost to report, and it is 0.
        costs = [metrics.get("cost", 0.0 if metrics.get("episodes") == 0 else None) for metrics in reported]
        known = [cost for cost in costs if cost is not None]
        if self._has_one_unit and len(known) == len(costs):
            totals[COST] = sum(known)
        return totals
