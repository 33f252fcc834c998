"""The nouns of playing: task, node, rollout and group.

A `Rollout` is one attempt at a `Task`, kept as a graph of `Node`s: concatenating the nodes' token ids along a
root-to-leaf path gives exactly the ids that the model saw. Sampled ids are never rewritten; a history that changes
forks a branch. `reward` is a number or None (not scored); an error is a `Failure` on the rollout, never reward 0.
Turning nodes into samples is `batching.samples`' work.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from jaxrl.blame import place_of
from jaxrl.errors import JaxrlError, SampleError
from jaxrl.types.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to attempt, as drawn."""

    env_name: str
    """The environment that plays it."""
    id: str
    """Stable identity within the environment."""
    spec: dict[str, Any]
    """The JSON value that the environment's task list holds; the environment alone knows its keys."""


class Boundary(StrEnum):
    """Where a rollout failed."""

    POLICY = "policy"
    """The inference endpoint refused, lost or mis-answered a request."""
    ENV = "env"
    """The environment raised while playing."""
    GRADER = "grader"
    """The reward function raised, or returned something that is not a finite number."""
    ALGORITHM = "algorithm"
    """A scoring hook failed or stamped an illegal stream."""
    TIMEOUT = "timeout"
    """The rollout ran past its deadline."""


class Bucket(StrEnum):
    """Where a dispatched rollout ended, exactly one for each; `filtered` makes the buckets of filters."""

    PENDING = "pending"
    """In flight, or waiting for a batch."""
    TRAINED = "trained"
    """At least one of its samples was in a train batch, with something left to train on where it had to be cut."""
    GATED = "gated"
    """Its group was turned away before a batch was formed, by a rule on whole groups."""
    STALE = "stale"
    """Its group was too old for its step."""
    OVERLONG_DROPPED = "overlong_dropped"
    """None of its samples fitted a row, or what was left of them had nothing to train on."""
    UNSCORED = "unscored"
    """The environment gave no reward."""
    ERRORED = "errored"
    """It has a `Failure`."""
    CANCELLED = "cancelled"
    """The run ended first, or no step was left that could train on it."""


def filtered(name: str) -> str:
    """Return the ledger bucket of rollouts that filter `name` dropped."""
    return f"filtered/{name}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout has no reward."""

    boundary: Boundary
    """Where it went wrong."""
    type: str
    """Name of the exception class."""
    message: str
    """What the exception said and, if nobody raised it on purpose, where."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that a reply asks for, or what was meant as one."""

    id: str
    """Unique in its conversation; the tool's result names it."""
    name: str
    """The tool; empty if not even that could be read."""
    arguments: dict[str, Any] | None
    """What the tool is called with, a JSON object; None if the call is malformed, which is never run."""
    raw: str
    """The JSON text of the arguments as it was written; for a malformed call, whatever stood in its place."""
    error: str = ""
    """Why the call is malformed, in words for the policy; empty if it is not."""


Writer = Literal["policy", "frozen", "demonstrations"]
"""Who writes replies: the policy, a frozen model, or the environment, whose demonstration stands in for one."""


@dataclass(slots=True)
class Node:
    """One span of a rollout's token stream: an input message, or one reply of the policy."""

    parent: int | None
    """Index of the parent node in `Rollout.nodes`; None for a root."""
    role: str
    """system, user, assistant or tool."""
    content: str
    """The text, for people and scorers; the truth is in `token_ids`."""
    token_ids: np.ndarray
    """[n] int32. In a sampled node the generation prompt comes first and the sampled tokens last."""
    sampled: bool = False
    """True if the policy wrote the tail of this node."""
    loss_mask: np.ndarray | None = None
    """[n] bool, or None for the default: True exactly on the sampled tokens."""
    is_content: np.ndarray | None = None
    """[n] bool, True on the message's own text and False on scaffolding; None when there is no attribution."""
    logprobs: np.ndarray | None = None
    """[num_sampled] float32, under the distribution that sampled; None for frozen and demonstration sources."""
    versions: np.ndarray | None = None
    """[num_sampled] int32, the policy version that sampled each token; None for frozen and demonstration sources."""
    num_sampled: int = 0
    """How many tokens at the tail were sampled."""
    temperature: float = 1.0
    """Temperature at which the tail was sampled."""
    finish_reason: str | None = None
    """stop, length or cancelled, for a sampled node."""
    source: Writer = "policy"
    """Who wrote the sampled tail."""
    name: str | None = None
    """The tool whose result a tool message is; None for any other message, and where nobody says."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that an assistant message holds, as parsed; for people and logs."""
    is_retold: bool = False
    """True if another node has the message as it was first said, and this one repeats it in a history that was written anew."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One root-to-leaf path of a rollout's nodes."""

    path: tuple[int, ...]
    """Indices into `Rollout.nodes`, root first."""
    trained: tuple[bool, ...]
    """Per node of the path: True if it has something to train on and no earlier branch trains it already."""


class Training(StrEnum):
    """What became of the step that a rollout was sent to the trainer for."""

    UNREPORTED = "unreported"
    """The trainer has not reported it."""
    SKIPPED = "skipped"
    """Its gradient was not finite, and the weights stayed as they were."""
    APPLIED = "applied"
    """The weights moved."""


@dataclass(slots=True)
class PackedSample:
    """What became of a sample that is in a train batch."""

    index: int
    """Its number among the batch's packed samples."""
    num_tokens: int
    """How many of its tokens fitted the row; those on the right of them were cut off."""
    trainer_logprobs: np.ndarray | None = None
    """[num_tokens] float32, at the sampling temperature; None unless the trainer was asked for them and has reported."""


@dataclass(slots=True)
class Rollout:
    """One attempt at a task."""

    task: Task
    group_id: str
    """Which group it belongs to; unique in a run."""
    member: int
    """0-based index within the group."""
    draw_index: int
    """Which draw of its environment the group came from; part of the sampling key."""
    nodes: list[Node] = field(default_factory=list)
    """The message graph, parents before children."""
    reward: float | None = None
    """What the environment gave; None if it could not score the rollout, or the rollout failed."""
    turn_rewards: list[float] | None = None
    """What the environment gave for each policy turn, in the order of the sampled nodes; None if it rewards whole rollouts only."""
    failure: Failure | None = None
    """Why it failed; None if it did not."""
    traceback: str = ""
    """Where a failure that nobody raised on purpose comes from, for the run's log; empty otherwise."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment wants to tell algorithms and logs; JSON-like."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment and the session report; written with the rollout."""
    stop_reason: str | None = None
    """Why the rollout ended, in the environment's words (done, max_turns, ...)."""
    is_truncated: bool = False
    """True if a token or turn limit cut the rollout; an attribute, not a ledger bucket."""
    samples: list[TrainingSample] = field(default_factory=list)
    """Filled on arrival by `batching.rollout_to_samples`, one per trainable branch."""
    bucket: str = Bucket.PENDING
    """Its ledger bucket."""
    packed: list[PackedSample | None] = field(default_factory=list)
    """For a rollout that was in a train batch, what became of each of its samples; None for one that was dropped as overlong."""
    training: Training = Training.UNREPORTED
    """What became of the step that it was sent for."""
    duration_s: float = 0.0
    """Seconds that playing it took."""
    is_frozen: bool = False
    """True once `finalize_group` has stamped the streams; writing them afterwards is an error."""

    @property
    def env_name(self) -> str:
        """Name of the environment that played it."""
        return self.task.env_name

    @property
    def num_turns(self) -> int:
        """Number of policy replies."""
        return sum(node.sampled for node in self.nodes)

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(node.num_sampled for node in self.nodes)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None without sampled live-policy tokens."""
        versions = [int(n.versions.min()) for n in self.nodes if n.versions is not None and len(n.versions)]
        return min(versions, default=None)

    @property
    def is_scored(self) -> bool:
        """True if the rollout has a reward and did not fail."""
        return self.reward is not None and self.failure is None

    @property
    def score(self) -> float:
        """The reward of a rollout that is known to be scored (`is_scored`); a missing reward here is our bug."""
        assert self.reward is not None, f"rollout {self.group_id}/{self.member} has no reward"
        return self.reward

    @property
    def completion_text(self) -> str:
        """The last reply of the policy, or the empty string."""
        return next((n.content for n in reversed(self.nodes) if n.sampled), "")

    @property
    def leaves(self) -> list[int]:
        """The nodes that no other node follows, as indices into `nodes`; each ends a branch."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def path_to(self, index: int) -> tuple[int, ...]:
        """Return the nodes from the root to a node, as indices into `nodes`, root first."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.nodes[at].parent
        return tuple(reversed(path))

    def branches(self) -> list[Branch]:
        """Return one branch per leaf; a sampled node that several share is trained in the first of them."""
        has_loss = [bool(n.num_sampled if n.loss_mask is None else np.any(n.loss_mask)) for n in self.nodes]
        taken: set[int] = set()
        branches: list[Branch] = []
        for leaf in self.leaves:
            path = self.path_to(leaf)
            branches.append(Branch(path, tuple(has_loss[index] and index not in taken for index in path)))
            if any(branches[-1].trained):
                taken.update(path)
        return branches

    def fail(self, boundary: Boundary, error: BaseException | str, *, kind: str | None = None) -> None:
        """Give the rollout a failure instead of a reward; the first failure of a rollout stays.

        Args:
          boundary: where it failed.
          error: the exception, or a sentence.
          kind: name of the failure; None takes the exception's class.
        """
        self.reward = None
        if self.failure is not None:
            return
        message = str(error) or repr(error)
        if isinstance(error, BaseException) and not isinstance(error, JaxrlError) and (place := place_of(error)):
            message = f"{message} ({place})"
            self.traceback = "".join(traceback.format_exception(error))
        self.failure = Failure(boundary=boundary, type=kind or type(error).__name__, message=message)

    def assign_advantages(self, values: float | Sequence[float] | np.ndarray) -> None:
        """Write the rollout's credit into its samples' `advantages` streams.

        A scalar is broadcast over the mask-True tokens; a list must have the full length of the samples' tokens,
        concatenated in sample order. "Assigned zeros" and "never assigned" (None) stay different states.

        Args:
          values: one number, or one number per token of all samples together. Unitless.

        Raises:
          SampleError: the rollout is frozen, a value is not finite, the list has another length, or a value off the
            loss mask is non-zero.
        """
        if self.is_frozen:
            raise SampleError(f"env {self.env_name!r}: advantages were assigned after `finalize_group` had frozen the rollout")
        values_flat = np.asarray(values, dtype=np.float32)
        if not np.isfinite(values_flat).all():
            raise SampleError(f"env {self.env_name!r}: an advantage is not finite: {values_flat.ravel()[:8].tolist()}")
        if values_flat.ndim == 0:
            for sample in self.samples:
                sample.advantages = np.where(sample.loss_mask, values_flat, np.float32(0.0)).astype(np.float32)
            return
        total = sum(len(sample) for sample in self.samples)
        if values_flat.shape != (total,):
            raise SampleError(
                f"env {self.env_name!r}: expected one advantage per token of the rollout's samples ({total}), got shape {values_flat.shape}"
            )
        offset = 0
        for sample in self.samples:
            part = values_flat[offset : offset + len(sample)]
            if np.any(part[~sample.loss_mask] != 0):
                raise SampleError(f"env {self.env_name!r}: an advantage off the loss mask is non-zero; only sampled tokens take credit")
            sample.advantages = part.copy()
            offset += len(sample)

    def mean_advantage(self) -> float | None:
        """Return the mean advantage over mask-True tokens, for monitoring; None if none was assigned, or there is no such token."""
        parts = [s.advantages[s.loss_mask] for s in self.samples if s.advantages is not None]
        flat = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return float(flat.mean()) if flat.size else None


@dataclass(slots=True)
class Group:
    """`group_size` rollouts of one task."""

    id: str
    """Unique in a run."""
    task: Task
    """What every rollout of it attempts."""
    draw_index: int
    """Which draw of its environment it is."""
    size: int
    """How many rollouts were asked for."""
    version: int
    """The policy version when the group was opened."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts that arrived so far, in member order once the group is complete."""

    def __iter__(self) -> Iterator[Rollout]:
        """Iterate over the rollouts that arrived."""
        return iter(self.rollouts)

    @property
    def is_complete(self) -> bool:
        """True once every rollout arrived, scored or not."""
        return len(self.rollouts) == self.size

    @property
    def survivors(self) -> list[Rollout]:
        """Scored rollouts with something to train on: what baselines and hooks see."""
        return [r for r in self.rollouts if r.is_scored and r.samples]
