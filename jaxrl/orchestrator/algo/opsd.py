"""OPSD: the teacher is the policy itself, as it is when the rollout arrives, with a demonstration before its eyes.

In: a rollout, and a demonstration of its task. Out: what the policy says of the rollout's own tokens when a system message
that shows the demonstration stands before them. The rollout is not rendered again: where its prompt begins with a system
message, written or put there by the chat template, the teacher reads two. No credit is given.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np

from jaxrl.config.algorithm import DEFAULT_DEMO_KEY, LossType, OPSDConfig
from jaxrl.envs.base import demonstrated_turns
from jaxrl.errors import ConfigError, EnvError, SampleError
from jaxrl.orchestrator.algo.base import Algorithm
from jaxrl.orchestrator.algo.reference import score_branches
from jaxrl.types import Rollout

REF_VERSION = "ref_version"
"""The metric of a rollout that says which policy version every endpoint served when scoring began; an update that comes meanwhile is
not waited for, so the next version may have scored it, or some of its branches."""


class OPSD(Algorithm):
    """On-policy self-distillation.

    Reference: Shenfeld et al. 2026, Self-Distillation Enables Continual Learning, https://arxiv.org/abs/2601.19897.
    """

    config: OPSDConfig
    action_loss_type: ClassVar[LossType] = "ref_kl"

    async def setup(self) -> None:
        """See that the chat template shows a system message.

        Raises:
          ConfigError: it refuses one, or leaves it out, or the shortest hint already fills the window.
        """
        hint, window = self.config.template.format(demonstration="jaxrl"), self.context.window
        try:
            hint_ids = await asyncio.to_thread(self.hint_ids, "jaxrl")
        except EnvError as error:
            raise self._unusable(str(error)) from error
        shown = self.renderer.decode(hint_ids)
        if hint.strip() not in shown:
            raise self._unusable(f"it leaves the message out and writes {shown!r:.200}")
        if window is not None and len(hint_ids) >= window:
            raise ConfigError(
                f"env {self.context.env_name!r}: `algo.template` with a demonstration of one word has {len(hint_ids)} tokens, which leaves "
                f"no room for a rollout in the window of {window}; widen it (`inference.max_model_len`), or shorten the template"
            )

    async def score_rollout(self, rollout: Rollout) -> None:
        """Let the policy score the very ids of every branch, after the hint."""
        hint_ids = await asyncio.to_thread(self.hint_ids, self.demonstration_of(rollout))
        version = self.policy_pool.version
        await score_branches(self.policy_pool, rollout, context_ids=hint_ids, bos_id=self.renderer.bos_id, window=self.context.window)
        rollout.metrics[REF_VERSION] = float(version)

    def demonstration_of(self, rollout: Rollout) -> str:
        """Return the demonstration of a rollout's task; the replies of several turns are joined by empty lines.

        It is what the environment told of the rollout under `demo_key`, else what the task holds there; for the default
        key, else the environment's own reference reply.

        Raises:
          SampleError: there is none, or it is neither a text nor a list of texts.
        """
        key, spec = self.config.demo_key, rollout.task.spec
        found = rollout.info.get(key, spec.get(key))
        if found is None and key == DEFAULT_DEMO_KEY:
            found = self.context.demonstration(spec)
        where = f"env {rollout.env_name!r}, task {rollout.task.id!r}"
        if found is None:
            raise SampleError(
                f"{where}: there is no demonstration under {key!r} (`demo_key`), neither in what the environment told of the rollout "
                "(`info`) nor in the task, and the environment has no reference reply of its own under that name"
            )
        shown = "\n\n".join(demonstrated_turns(found) or ())
        if not shown.strip():
            raise SampleError(
                f"{where}: the demonstration under {key!r} (`demo_key`) must be a text that is not empty, or a list of texts, "
                f"got {found!r:.80}"
            )
        return shown

    def hint_ids(self, demonstration: str) -> np.ndarray:
        """Return [C] int32 of the system message that shows a demonstration, nothing asked after it."""
        hint = self.config.template.format(demonstration=demonstration)
        return self.renderer.message_ids([{"role": "system", "content": hint}])

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"env {self.context.env_name!r}: `algo.type`='opsd' shows its demonstration in a system message, and the policy's chat "
            f"template cannot have one by itself: {why}; use a model whose template takes a system message"
        )
