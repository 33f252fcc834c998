"""ECHO: grpo on what the policy wrote, cross-entropy on what the environment said to it, by role.

In: a rollout on arrival, the survivors of its group. Out: `ce_weights` on observations, and grpo's credit. An observation is what
the environment said after the policy's first reply: the tokens of the nodes that were not sampled and follow one that was. It
trains no prompt, no token of the policy and, where it is known which tokens are template text, none of those.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from jaxrl.batching import trainable_branches
from jaxrl.config.algorithm import EchoConfig, LossType, RoleConfig, ToolRoleConfig
from jaxrl.envs.hooks import called, imported
from jaxrl.errors import ConfigError, SampleError
from jaxrl.orchestrator.algo.base import Algorithm, AlgorithmContext
from jaxrl.orchestrator.algo.group_credit import credit_by_group_mean
from jaxrl.orchestrator.ports import ScoringPolicy
from jaxrl.types import Branch, Node, Rollout

logger = logging.getLogger(__name__)

SILENT_ROLLOUTS = 64
"""After so many rollouts of an environment without a token to learn from it is warned of."""


class Echo(Algorithm):
    """Policy gradient on the policy's tokens and cross-entropy on the environment's.

    An observation that several branches share is trained once for each token, in the first branch whose mask keeps it.
    """

    config: EchoConfig
    action_loss_type: ClassVar[LossType] = "rl"

    def __init__(self, config: EchoConfig, policy_pool: ScoringPolicy, context: AlgorithmContext | None = None) -> None:
        super().__init__(config, policy_pool, context)
        where = f"env {self.context.env_name!r}"
        if context is not None and context.renderer is None:
            raise ConfigError(
                f"{where}: `algo.type`='echo' learns from the tokens of the environment's messages, and nobody makes any: the run has no "
                "renderer; give it a model with a tokenizer, or use 'grpo'"
            )
        keep = config.filter
        self._filter = keep and imported(keep.import_path, f"{where}: `algo.filter.import_path`={keep.import_path!r}")
        self._has_seen_whole_span = False
        self._is_watching, self._num_seen = True, 0
        self._heard: dict[str, set[str]] = {}
        """The roles of the observations of the rollouts so far, with the names of tools; until something is learned from."""

    async def score_rollout(self, rollout: Rollout) -> None:
        """Write the weights of a rollout's observations into its samples; one without any gets no stream."""
        branches = trainable_branches(rollout)
        masks = await self._masks(rollout, branches)
        for role in self.config.table:
            rollout.metrics[f"observation_tokens/{role}"] = 0.0
        taken: dict[int, np.ndarray] = {}
        for branch, mask, sample in zip(branches, masks, rollout.samples, strict=True):
            weights = np.zeros(len(sample), np.float32)
            for index, start in _observations(rollout, branch):
                node = rollout.nodes[index]
                if self._is_watching:
                    self._heard.setdefault(node.role, set()).update([node.name] if node.name else [])
                role = self._role_of(node)
                if role is None:
                    continue
                at = slice(start, start + len(node.token_ids))
                earlier = taken.get(index, np.zeros(len(node.token_ids), bool))
                chosen = self._own_tokens(node) & mask[at] & ~earlier
                taken[index] = earlier | chosen
                weights[at][chosen] = role.alpha
                rollout.metrics[f"observation_tokens/{node.role}"] += float(chosen.sum())
            if weights.any():
                sample.ce_weights = weights
                self._is_watching = False
        if self._is_watching:
            self._watch()

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Give the policy's tokens the credit that grpo gives."""
        credit_by_group_mean(rollouts, self.config)

    def _role_of(self, node: Node) -> RoleConfig | None:
        """Return how a node's message is learned from; None if it is not."""
        role = self.config.table.get(node.role)
        is_other_tool = isinstance(role, ToolRoleConfig) and role.tool_names is not None and node.name not in role.tool_names
        return None if is_other_tool else role

    def _watch(self) -> None:
        """Say once, after a number of rollouts, that nothing of them was learned from, and what to set."""
        self._num_seen += 1
        if self._num_seen < SILENT_ROLLOUTS:
            return
        self._is_watching = False
        logger.warning(
            "env %r: `echo` has learned from nothing that the environment said, in %d rollouts: %s, or use `algo.type`='grpo' (said once)",
            self.context.env_name, self._num_seen, self._why_silent(),
        )  # fmt: skip

    def _why_silent(self) -> str:
        """Return who spoke, who is listened to, and what to set."""
        if not self._heard:
            return "no message came after its first reply; see why it calls no tool, or give it more turns"
        heard, table = self._heard, self.config.table
        spoken = _listed([role + _named(sorted(names)) for role, names in sorted(heard.items(), key=lambda item: item[0] == "tool")])
        names = {role: getattr(of, "tool_names", None) or () for role, of in table.items()}
        listened = _listed([role + _named(names[role], "`tool_names` ") for role in table])
        told = f"after its first reply there were messages of {spoken}"
        others = [role for role in heard if role not in table]
        if any(role in table and (not names[role] or heard[role] & set(names[role])) for role in heard):
            return f"{told}, of which no token was left: all are template text, or `algo.filter` takes them out; see to that"
        remedy = (
            f"name a role that occurs, such as `algo.roles.{others[0]}.alpha`=0.1"
            if others
            else "name a tool that occurs in `algo.roles.tool.tool_names`"
        )
        return f"{told}, and `algo.roles` has {listened}; {remedy}"

    def _own_tokens(self, node: Node) -> np.ndarray:
        """Return [n] bool, the tokens of a message's own text; all of them if nobody says which those are."""
        if node.is_content is not None and len(node.is_content) == len(node.token_ids):
            return np.asarray(node.is_content, bool)
        if not self._has_seen_whole_span:
            self._has_seen_whole_span = True
            logger.warning(
                "env %r: nothing says which tokens of its messages are template text, so `echo` learns from whole messages (said once)",
                self.context.env_name,
            )
        return np.ones(len(node.token_ids), bool)

    async def _masks(self, rollout: Rollout, branches: Sequence[Branch]) -> list[np.ndarray]:
        """Return, for each branch, [L] bool, the tokens that the filter keeps; without a filter, all."""
        lengths = [sum(len(rollout.nodes[index].token_ids) for index in branch.path) for branch in branches]
        if self._filter is None or self.config.filter is None:
            return [np.ones(length, bool) for length in lengths]
        # The deadline is that of the whole hook.
        keep = partial(self._filter, rollout, **self.config.filter.kwargs)
        masks = await called(keep, what="the filter's answer", deadline_s=math.inf, thread="echo filter")
        where = f"env {rollout.env_name!r}, task {rollout.task.id!r}: the filter {self.config.filter.import_path!r}"
        return _checked_masks(masks, lengths, where)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _named(names: Sequence[str], before: str = "") -> str:
    return f" ({before}{', '.join(map(repr, names))})" if names else ""


def _observations(rollout: Rollout, branch: Branch) -> Iterator[tuple[int, int]]:
    """Yield the nodes of a branch that nobody sampled and that follow a reply of the policy: index, and offset in the branch.

    Where a history was written anew, what is told again is learned from where it was first said, and a reply is among it.
    """
    has_reply, start = False, 0
    for index in branch.path:
        node = rollout.nodes[index]
        if has_reply and not node.sampled and not node.is_retold:
            yield index, start
        has_reply = has_reply or node.sampled or node.is_retold
        start += len(node.token_ids)


def _checked_masks(masks: Any, lengths: Sequence[int], where: str) -> list[np.ndarray]:
    """Return a filter's masks as arrays, [L] bool for each branch.

    Raises:
      SampleError: they are no list of one mask for each branch, or a mask is no list of one bool for each token.
    """
    rule = f"it must return {len(lengths)} masks, one for each branch that is trained"
    if not isinstance(masks, list | tuple | np.ndarray):
        raise SampleError(f"{where} returned a {type(masks).__name__}; {rule}")
    if len(masks) != len(lengths):
        raise SampleError(f"{where} returned {len(masks)} masks; {rule}")
    checked: list[np.ndarray] = []
    for number, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        rule = f"the mask of branch {number} must have {length} bools, one for each of its tokens"
        if not isinstance(mask, list | tuple | np.ndarray):
            raise SampleError(f"{where} returned a {type(mask).__name__} as mask; {rule}")
        if len(mask) != length:
            raise SampleError(f"{where} returned a mask of {len(mask)}; {rule}")
        wrong = next(((at, value) for at, value in enumerate(mask) if not isinstance(value, bool | np.bool_)), None)
        if wrong is not None:
            raise SampleError(f"{where} returned {wrong[1]!r:.80} at token {wrong[0]}; {rule}")
        checked.append(np.asarray(mask, bool))
    return checked
