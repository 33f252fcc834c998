"""One training environment, wired: who plays its rollouts, whose replies they hold, who credits them.

In: a rollout without tokens. Out: the same rollout, played. The pipeline asks these objects and never looks at an
environment's or an algorithm's type, nor at who writes the replies (`sources`). Which task is played, and when, is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl.config.turns import Truncated
from jaxrl.envs.base import Environment, Session
from jaxrl.envs.play import play_rollout
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import Algorithm
from jaxrl.orchestrator.ports import ConnectedPool
from jaxrl.orchestrator.sources import Source
from jaxrl.tasks import Gate, TaskSampler
from jaxrl.types import Rollout


@dataclass(frozen=True, slots=True)
class Sampler:
    """Plays the rollouts of one environment."""

    environment: Environment
    """The world."""
    source: Source
    """Who writes the replies."""
    rollout_deadline_s: float
    """A rollout, and then its scoring, may take this long."""

    @property
    def renderer(self) -> Renderer:
        """Messages to token ids and back, with the policy's tokenizer."""
        return self.source.renderer

    @property
    def samples_from_live_policy(self) -> bool:
        """False if somebody else than the policy writes the replies: such rollouts have no policy version and never go stale."""
        return self.source.is_live_policy

    @property
    def connected_pools(self) -> list[ConnectedPool]:
        """Pools that `setup` took on; the run closes exactly these."""
        return self.source.connected_pools

    async def setup(self) -> None:
        """Get ready before the first rollout; raises what connecting a model raises."""
        await self.source.setup()

    def open_session(self, rollout: Rollout) -> Session:
        """Return the conversation of one rollout; every token of it is recorded on the rollout."""
        return self.source.open_session(rollout)

    async def play(self, rollout: Rollout) -> None:
        """Play one rollout to its end; what goes wrong is written on it. Raises nothing but cancellation."""
        async with self.source.places:
            await play_rollout(self.environment, rollout, self.open_session(rollout), self.rollout_deadline_s)


@dataclass(frozen=True, slots=True)
class TrainEnv:
    """Everything that the pipeline asks of one training environment."""

    name: str
    """Unique among the training environments."""
    ratio: float
    """Share of the groups, relative to the other environments' ratios."""
    tasks: TaskSampler
    """Which task next."""
    sampler: Sampler
    """Who plays it."""
    algorithm: Algorithm
    """Who credits it."""
    truncated: Truncated = "train"
    """What becomes of a rollout that a limit cut short."""
    cost: str = "completion_tokens"
    """What a rollout costs: `completion_tokens`, or the name of a number that the environment reports with each rollout."""
    gates: Sequence[Gate] = ()
    """What a group must pass to get into a batch."""
