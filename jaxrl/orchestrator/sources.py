"""Who writes the replies of an environment's rollouts, and what follows from it.

    source           asks                      its tokens carry        goes stale  places
    the policy       the policy's pool         logprobs and versions   yes         the engine's, shared by all environments
    a frozen model   a pool of its own         nothing                 never       `max_concurrency` of that model
    demonstrations   the environment itself    nothing                 never       none: nobody is asked

A frozen model whose vocabulary is not the policy's, or not known to be, is asked in words, and what it says is encoded with the
policy's tokenizer. Seeds are made alike for every model, so a run can be repeated where a server honours them; at temperature 0, and
with demonstrations, all rollouts of a group are equal, so a group of one loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl.config.env import SamplingConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Demonstration, Session, TaskSpec
from jaxrl.envs.session import PolicySession
from jaxrl.envs.text_session import ForeignModel, TextSession, demonstration_session
from jaxrl.envs.transcript import Window
from jaxrl.errors import ConfigError
from jaxrl.inference.endpoint import version_salt
from jaxrl.inference.frozen import FrozenPool, connect_frozen_pool
from jaxrl.inference.pool import Pool
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.vocabulary import why_in_words
from jaxrl.orchestrator.ports import ConnectedPool
from jaxrl.types import Rollout

logger = logging.getLogger(__name__)

TRAINABLE = "`inference.max_model_len` and `trainer.row_length`"
"""What bounds a reply that can be trained on, for messages."""


class LivePool(Pool, Protocol):
    """The policy's pool."""

    @property
    def version(self) -> int:
        """The version that is served."""
        ...


class Source(Protocol):
    """Who writes the replies."""

    @property
    def renderer(self) -> Renderer:
        """Messages to token ids and back, with the policy's tokenizer."""
        ...

    @property
    def is_live_policy(self) -> bool:
        """True if the policy that is trained writes: its tokens have versions and grow stale."""
        ...

    @property
    def places(self) -> AbstractAsyncContextManager[Any]:
        """What a rollout holds while it plays.

        It waits here before its deadline starts to run; where requests wait for one another, the wait would count.
        """
        ...

    @property
    def connected_pools(self) -> list[ConnectedPool]:
        """The pools that `setup` took on; the run closes exactly these."""
        ...

    async def setup(self) -> None:
        """Get ready before the first rollout."""
        ...

    def open_session(self, rollout: Rollout) -> Session:
        """Return the conversation of one rollout; every token of it is recorded on the rollout."""
        ...


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The policy that is trained."""

    pool: LivePool
    renderer: Renderer
    sampling: SamplingConfig
    """How tokens are sampled."""
    run_seed: int
    """`run.seed`; part of every sampling key."""
    window: int
    """Prompt plus completion tokens that the policy can hold."""
    places: asyncio.Semaphore
    """Rollouts that may play at the same time, those of other environments of the same policy included."""
    history: History = "template"
    """What a later turn makes of earlier ones."""

    @property
    def is_live_policy(self) -> bool:
        """True."""
        return True

    @property
    def connected_pools(self) -> list[ConnectedPool]:
        """None: the policy's pool belongs to the run."""
        return []

    async def setup(self) -> None:
        """Do nothing: the policy is served."""

    def open_session(self, rollout: Rollout) -> Session:
        """See `Source.open_session`."""
        return PolicySession(
            self.pool,
            self.renderer,
            rollout,
            self.sampling,
            run_seed=self.run_seed,
            seed_scope=rollout.env_name,
            window=self.window,
            cache_salt=lambda: version_salt(self.pool.version),
            history=self.history,
        )


@dataclass(frozen=True, slots=True)
class DemonstrationSource:
    """The environment's own reference replies."""

    renderer: Renderer
    demonstration: Callable[[TaskSpec], Demonstration | None]
    """Task spec -> the reference replies; None if there are none."""
    window: int
    """Prompt plus reply tokens that can be trained on."""
    places: AbstractAsyncContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """As many as are asked for."""
    history: History = "template"
    """What a later turn makes of earlier ones."""

    @property
    def is_live_policy(self) -> bool:
        """False."""
        return False

    @property
    def connected_pools(self) -> list[ConnectedPool]:
        """None."""
        return []

    async def setup(self) -> None:
        """Do nothing."""

    def open_session(self, rollout: Rollout) -> Session:
        """See `Source.open_session`."""
        window = Window(self.window, TRAINABLE)
        return demonstration_session(rollout, self.renderer, self.demonstration, window=window, history=self.history)


class FrozenSource:
    """A frozen model behind servers of its own.

    Args:
      model: the model.
      renderer: with the policy's tokenizer.
      sampling: how tokens are sampled; may be greedy or truncated, since nothing needs their logprobs.
      run_seed: `run.seed`.
      window: prompt plus reply tokens that can be trained on; the model's own window bounds a rollout too.
      history: what a later turn makes of earlier ones.
    """

    def __init__(
        self,
        model: FrozenModelConfig,
        renderer: Renderer,
        sampling: SamplingConfig,
        *,
        run_seed: int,
        window: int,
        history: History = "template",
    ) -> None:
        self.renderer = renderer
        self.places = asyncio.Semaphore(model.max_concurrency)
        """Rollouts that may play at the same time: as many as the pool has places for their requests."""
        self.connected_pools: list[ConnectedPool] = []
        self.why_in_words: str | None = None
        """Why the model is asked in words, known after `setup`; None if it is asked in tokens."""
        self._model = model
        self._sampling = sampling
        self._run_seed = run_seed
        self._window = Window(window, TRAINABLE)
        self._history: History = history
        self._pool: FrozenPool | None = None

    @property
    def is_live_policy(self) -> bool:
        """False."""
        return False

    async def setup(self) -> None:
        """Connect the model, wait until it is ready, and find out whether its tokens are the policy's.

        Raises:
          ConfigError: its key does not do, or its window has no room for a prompt.
          EngineError: it does not serve the model.
          DeadlineError: it is not ready in time.
        """
        pool = connect_frozen_pool(self._model)
        self.connected_pools.append(pool)
        await pool.setup()
        if pool.window is not None and pool.window <= self._sampling.max_tokens:
            raise ConfigError(
                f"{pool} holds sequences of {pool.window} tokens, and `sampling.max_tokens`={self._sampling.max_tokens} leaves no room for "
                "a prompt; lower it, or serve the model with a longer window"
            )
        self.why_in_words = await why_in_words(pool, self.renderer)
        if self.why_in_words is not None:
            logger.info("%s is asked in words, and its replies are encoded with the policy's tokenizer: %s", pool, self.why_in_words)
        elif pool.window is not None and pool.window < self._window.num_tokens:
            self._window = Window(pool.window, f"the window that {pool} is served with")
        self._pool = pool

    def open_session(self, rollout: Rollout) -> Session:
        """See `Source.open_session`."""
        pool = self._pool
        assert pool is not None, "`setup` comes before the first rollout"
        if self.why_in_words is not None:
            source = ForeignModel(pool, rollout, self._sampling, run_seed=self._run_seed)
            stop, history = self._sampling.stop, self._history
            return TextSession(source, self.renderer, rollout, window=self._window, writer="frozen", stop=stop, history=history)
        return PolicySession(
            pool,
            self.renderer,
            rollout,
            self._sampling,
            run_seed=self._run_seed,
            seed_scope=rollout.env_name,
            window=self._window,
            is_frozen=True,
            history=self._history,
        )
