"""One training environment, wired: who plays its rollouts, whose replies they hold, who credits them.

In: a rollout without tokens. Out: the same rollout, played. The pipeline asks these objects and never looks at an
environment's or an algorithm's type. Which task is played, and when, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Environment, Session
from jaxrl.envs.play import play_rollout
from jaxrl.envs.session import PolicySession
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import Algorithm
from jaxrl.tasks import TaskSampler
from jaxrl.types import Rollout


@dataclass(frozen=True, slots=True)
class Sampler:
    """Plays the rollouts of one environment."""

    environment: Environment
    """The world."""
    pool: Pool
    """Where replies come from."""
    renderer: Renderer
    """Messages to token ids and back, with the tokenizer of `pool`'s model."""
    sampling: SamplingConfig
    """How tokens are sampled."""
    run_seed: int
    """`run.seed`; part of every sampling key."""
    window: int
    """Prompt plus completion tokens that the policy can hold."""
    rollout_deadline_s: float
    """A rollout, and then its scoring, may take this long."""
    places: asyncio.Semaphore
    """Rollouts that may play at the same time, those of other environments of the same policy included. A rollout waits here before its
    deadline starts to run; beyond the engine's slots it would wait there, and the wait would count."""
    samples_from_live_policy: bool = True
    """False for a frozen source: its rollouts have no policy version and never go stale."""

    def open_session(self, rollout: Rollout) -> Session:
        """Return the conversation of one rollout with the policy; every token of it is recorded on the rollout."""
        return PolicySession(
            self.pool,
            self.renderer,
            rollout,
            self.sampling,
            run_seed=self.run_seed,
            seed_scope=rollout.env_name,
            window=self.window,
        )

    async def play(self, rollout: Rollout) -> None:
        """Play one rollout to its end; what goes wrong is written on it. Raises nothing but cancellation."""
        async with self.places:
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
