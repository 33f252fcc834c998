"""What an algorithm is: two hooks that score, the loss that it feeds, and two drivers that nobody overrides.

In: rollouts as they arrive, then the survivors of a complete group. Out: the same rollouts with their samples' streams
stamped and frozen. An algorithm never drops a rollout, never sees a batch, and never closes the policy's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from jaxrl.config.algorithm import AlgorithmConfig, CoefficientsConfig, LossType
from jaxrl.config.model import FrozenModelConfig
from jaxrl.envs.base import Demonstration, TaskSpec
from jaxrl.errors import ConfigError, DeadlineError, EngineError, SampleError
from jaxrl.inference.frozen import FrozenPool, connect_frozen_pool
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.vocabulary import vocabulary_difference
from jaxrl.orchestrator.algo.routing import check_streams, fold_coefficients, stamp_loss_routing
from jaxrl.orchestrator.ports import ScoringPolicy
from jaxrl.types import OPTIONAL_STREAMS, Boundary, Rollout

DRIVERS = ("finalize_rollout", "finalize_group")


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """What an algorithm may know of the environment and the run that it credits."""

    env_name: str = ""
    """The environment, for messages."""
    renderer: Renderer | None = None
    """Messages to token ids with the policy's tokenizer; None will do for algorithms that ask no model."""
    window: int | None = None
    """The longest sequence, prompt and reply, that the policy can hold; None if unknown."""
    coefficients: CoefficientsConfig = field(default_factory=CoefficientsConfig)
    """How much each loss component counts."""
    demonstration: Callable[[TaskSpec], Demonstration | None] = lambda spec: None
    """Task spec -> the environment's own reference replies; None if it has none."""


class Algorithm:
    """Credit for the rollouts of one environment; one instance per environment.

    A subclass overrides `score_group` (most), `score_rollout` (where a model must be asked), `setup`, and the state
    methods if it remembers anything between groups. An exception of a hook fails the rollouts that it was scoring
    (boundary `algorithm`), not the run.
    """

    action_loss_type: ClassVar[LossType] = "rl"
    """The loss component that the sampled tokens feed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that overrides a driver."""
        super().__init_subclass__(**kwargs)
        overridden = [name for name in DRIVERS if name in cls.__dict__]
        if overridden:
            name = f"{cls.__name__}.{overridden[0]}"
            raise TypeError(f"`{name}` overrides a driver; override `score_rollout` or `score_group` instead")

    def __init__(self, config: AlgorithmConfig, policy_pool: ScoringPolicy, context: AlgorithmContext | None = None) -> None:
        self.config = config
        self.policy_pool = policy_pool
        self.context = context or AlgorithmContext()
        self.connected_pools: list[FrozenPool] = []
        """Pools of frozen models that `connect` took on; the run closes exactly these."""
        self.max_concurrency: int | None = None
        """Requests that the narrowest of those pools takes at a time: more hooks than that would only wait for one another. None
        without pools."""

    @property
    def renderer(self) -> Renderer:
        """Messages to token ids with the policy's tokenizer, for algorithms that ask a model."""
        assert self.context.renderer is not None, f"{type(self).__name__} needs a renderer in its context"
        return self.context.renderer

    async def setup(self) -> None:
        """Get ready before the first rollout: connect frozen models, look at the chat template."""

    async def connect(self, model: FrozenModelConfig, key: str) -> FrozenPool:
        """Connect a frozen model that will be asked for logprobs, and wait until it is ready; the run closes its pool.

        Each environment has connections of its own, also to a model that another one names too.

        Args:
          model: name, servers and limits.
          key: which setting of the algorithm it is, for messages.

        Raises:
          ConfigError: its key or its window does not do, or its vocabulary is not the policy's.
          EngineError: it does not serve the model, or cannot score.
          DeadlineError: it is not ready in time.
        """
        where = f"env {self.context.env_name!r}: `algo.{key}`"
        # The highest id is among them: a model of fewer tokens refuses it, whatever else its server tells.
        scored_ids = np.array([0, self.renderer.num_ids - 1], np.int32)
        try:
            pool = connect_frozen_pool(model)
            self.connected_pools.append(pool)
            self.max_concurrency = min(model.max_concurrency, self.max_concurrency or model.max_concurrency)
            await pool.setup(window=self.context.window, scored_ids=scored_ids)
            difference = await vocabulary_difference(pool, self.renderer, may_be_larger=True)
        except (ConfigError, EngineError, DeadlineError) as error:
            raise type(error)(f"{where}: {error}") from error
        if difference is not None:
            raise ConfigError(
                f"{where}: {model.name!r} has another vocabulary than the policy, so it cannot score the policy's tokens: {difference}; "
                "use a model with the policy's tokenizer, or `type`='sft' to learn from its text"
            )
        return pool

    async def score_rollout(self, rollout: Rollout) -> None:
        """Hook on arrival, before the group is complete: the place to ask a model about one rollout."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Hook on completion of a group: write credit and weights into its survivors' samples, in member order."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the algorithm remembers between groups, as a JSON object."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"`{type(self).__name__}` remembers nothing, but the state to restore has {sorted(state)}")

    @final
    async def finalize_rollout(self, rollout: Rollout) -> None:
        """Score one rollout on arrival; one without samples is passed over.

        Args:
          rollout: its `samples` are filled.
        """
        if rollout.samples:
            await self.score_rollout(rollout)

    @final
    async def finalize_group(self, rollouts: Sequence[Rollout]) -> None:
        """Score a group's survivors, stamp where their tokens go and how much they count, check every stream, and freeze them.

        A rollout whose streams break a rule fails alone (boundary `algorithm`); its siblings keep the credit they were
        given.

        Args:
          rollouts: the survivors (scored, with samples), in member order; may be empty.

        Raises:
          Exception: whatever `score_group` raised; the caller fails all of `rollouts` with it.
        """
        if rollouts:
            await self.score_group(rollouts)
        for rollout in rollouts:
            try:
                self._stamp(rollout)
            except SampleError as error:
                rollout.fail(Boundary.ALGORITHM, error)
            freeze(rollout)

    def _stamp(self, rollout: Rollout) -> None:
        for sample in rollout.samples:
            stamp_loss_routing(sample, self.action_loss_type)
            fold_coefficients(sample, self.context.coefficients)
            check_streams(sample)


def assign_each(rollouts: Sequence[Rollout], advantages_G: np.ndarray) -> None:
    """Give each rollout its own number as the credit of all its sampled tokens.

    Args:
      rollouts: G rollouts, not frozen.
      advantages_G: [G] finite float32, in the order of `rollouts`.
    """
    for rollout, advantage in zip(rollouts, advantages_G, strict=True):
        rollout.assign_advantages(float(advantage))


def freeze(rollout: Rollout) -> None:
    """Make the streams of a rollout's samples read-only: what was scored is what is trained."""
    rollout.is_frozen = True
    for sample in rollout.samples:
        for name in OPTIONAL_STREAMS:
            stream = getattr(sample, name)
            if isinstance(stream, np.ndarray):
                stream.flags.writeable = False
