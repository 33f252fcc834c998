"""Who is measured: something that answers the episodes of an evaluation, and can be kept as it is meanwhile.

In: a rollout and how its tokens are sampled. Out: a session that records it. The policy of a run, a model behind an endpoint and a
plain function of a caller's are all asked through this; the harness knows none of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import History
from jaxrl.envs.base import Session
from jaxrl.envs.session import PolicySession, eval_seed_scope
from jaxrl.inference.endpoint import version_salt
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout


class EvalPolicy(Protocol):
    """Somebody who can be measured."""

    def hold(self, holder: str) -> AbstractAsyncContextManager[int | None]:
        """Keep the policy as it is for the body of the `async with`, and give its version; None where nobody counts versions."""
        ...

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> Session:
        """Return the conversation of one episode; whatever is said in it is recorded on the rollout."""
        ...


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """The policy that an engine of ours serves, in a run or by itself."""

    pool: PolicyPool
    renderer: Renderer
    run_seed: int
    """`run.seed`; part of every sampling key, with a scope that no training environment has."""
    window: int
    """Prompt plus reply tokens that it can hold."""
    hold_deadline_s: float = 600.0
    """How long weight updates are kept waiting."""

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[int | None]:
        """See `EvalPolicy.hold`."""
        async with self.pool.hold_version(holder, self.hold_deadline_s) as version:
            yield version

    def open_session(self, rollout: Rollout, sampling: SamplingConfig, history: History) -> Session:
        """See `EvalPolicy.open_session`."""
        return PolicySession(
            self.pool,
            self.renderer,
            rollout,
            sampling,
            run_seed=self.run_seed,
            seed_scope=eval_seed_scope(rollout.env_name),
            window=self.window,
            cache_salt=lambda: version_salt(self.pool.version),
            history=history,
        )
