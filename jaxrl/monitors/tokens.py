"""What the rollout log says of each token: who wrote it, what the loss multiplies it by, and why it is not trained.

In: one branch of a decided rollout, its sample if it has one, and what the trainer reported. Out: lists of one length,
ready for JSON. Which token is trained is `types.component_members`, and nothing here is a second rule. Reading and
writing files is `monitors.rollouts`' work; `docs/rollouts.md` is for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxrl.types import Bucket, Members, Node, PackedSample, Rollout, Training, TrainingSample

SCAFFOLD = "scaffold"
ORIGINS = {
    "system": "a message of this role",
    "user": "a message of this role",
    "assistant": "a message of this role that the environment gave, such as an example of an answer, or a reply that is told again in a "
    "history that was rewritten",
    "tool": "a message of this role",
    SCAFFOLD: "the chat template: the generation prompt, and whatever else of a message's tokens is known not to be its own text",
    "policy": "the model that is trained",
    "frozen": "a frozen model",
    "demonstrations": "the environment, whose demonstration stands in for a reply",
}
"""Who wrote a token, with the meaning of each."""

INPUT, MASKED, OTHER_BRANCH, ZERO_WEIGHT, TRUNCATED = "input", "masked", "other_branch", "zero_weight", "truncated"
REASONS = {
    INPUT: "nobody sampled it, and it has no weight of its own: a prompt, a tool's result, template text",
    MASKED: "sampled, but the environment, its `truncated` = \"mask\" or the algorithm took it out of the loss mask",
    OTHER_BRANCH: "shared with an earlier branch of the rollout, which has it in its loss mask",
    ZERO_WEIGHT: "in the loss mask, but all three weights are 0",
    TRUNCATED: "cut off: its sample is longer than a row (`trainer.overlong = \"truncate\"`)",
    Bucket.OVERLONG_DROPPED: "its sample, or the whole rollout, is longer than a row or had nothing left to train on",
    Bucket.GATED: "its group was turned away before a batch was formed",
    Bucket.STALE: "its group was too old for its step",
    Bucket.UNSCORED: "the environment gave the rollout no reward",
    Bucket.ERRORED: "the rollout failed; `error` says how",
    Bucket.CANCELLED: "the run ended first, or no step was left that could train on it",
    "filtered/<name>": "the filter of that name dropped the rollout; `filtered/truncated`: a limit cut it, and its environment does not "
    "train those (`truncated`)",
    Training.SKIPPED: "it was in the batch, but the gradient of the step was not finite and the weights stayed as they were",
    Training.UNREPORTED: "it was in the batch, but the run ended before the trainer reported the step",
}
"""Why a token is not trained, with the meaning of each. What befell the whole rollout, or a whole sample, is said of each of its
tokens, whatever else is true of them."""


@dataclass(frozen=True, slots=True)
class PlayedBranch:
    """A branch of a rollout with what became of it."""

    path: tuple[int, ...]
    """Indices into the rollout's nodes, root first."""
    nodes: list[Node]
    """The nodes themselves."""
    is_shared: list[bool]
    """Per node: True if an earlier branch trains it."""
    sample: TrainingSample | None
    """What may be trained of it; None if there is nothing, or the rollout failed before samples were made."""
    members: Members | None
    """Which of the sample's tokens are in which loss component."""
    packed: PackedSample | None
    """Where it went in a batch; None if it is in none, or that is not known."""
    is_dropped: bool
    """True if it was left out of a batch that trains another branch of the rollout."""


def played_branches(rollout: Rollout) -> Iterator[PlayedBranch]:
    """Yield every branch of a rollout with its sample, in leaf order: samples are in the order of the branches that train."""
    num_samples = 0
    shared: set[int] = set()
    for branch in rollout.branches():
        sample = packed = members = None
        is_dropped = False
        if any(branch.trained) and num_samples < len(rollout.samples):
            sample = rollout.samples[num_samples]
            members = sample.members()
            if rollout.packed:
                packed = rollout.packed[num_samples]
                is_dropped = packed is None
            num_samples += 1
        nodes, is_shared = [rollout.nodes[index] for index in branch.path], [index in shared for index in branch.path]
        yield PlayedBranch(branch.path, nodes, is_shared, sample, members, packed, is_dropped)
        if any(branch.trained):
            shared.update(branch.path)


def is_sampled(node: Node) -> np.ndarray:
    """Return [n] bool, True on the tail that was sampled."""
    return np.arange(len(node.token_ids)) >= len(node.token_ids) - node.num_sampled


def loss_mask(branch: PlayedBranch) -> np.ndarray:
    """Return [L] bool, the sample's loss mask; what it would be if the branch has no sample."""
    return _asked(branch) & ~_shared(branch) if branch.sample is None else branch.sample.loss_mask


def _asked(branch: PlayedBranch) -> np.ndarray:
    """Return [L] bool, the loss mask that the nodes ask for."""
    masks = [is_sampled(node) if node.loss_mask is None else np.asarray(node.loss_mask, bool) for node in branch.nodes]
    return np.concatenate(masks)


def _shared(branch: PlayedBranch) -> np.ndarray:
    """Return [L] bool, True on the nodes that an earlier branch trains."""
    return np.repeat(branch.is_shared, [len(node.token_ids) for node in branch.nodes])


def origins(node: Node) -> list[str]:
    """Return who wrote each token of a node.

    A node without attribution (`is_content` None) gives its template text to the message's role.

    Example:
      >>> reply = Node(0, "assistant", "yo", np.array([1, 2, 7]), sampled=True, num_sampled=1, source="frozen")
      >>> origins(reply)
      ['scaffold', 'scaffold', 'frozen']
    """
    if node.num_sampled:
        return [SCAFFOLD] * (len(node.token_ids) - node.num_sampled) + [node.source] * node.num_sampled
    if node.sampled:  # an empty reply is its generation prompt
        return [SCAFFOLD] * len(node.token_ids)
    if node.is_content is None:
        return [node.role] * len(node.token_ids)
    return [node.role if is_own else SCAFFOLD for is_own in node.is_content.tolist()]


def resolved_weights(sample: TrainingSample, members: Members) -> dict[str, np.ndarray]:
    """Return what the loss multiplies each component's term by, [L] each; 0 off its members, and left out if it has none.

    Example:
      >>> zeros = np.zeros(3, np.float32)
      >>> sample = TrainingSample(token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]), env_name="toy",
      ...                         inference_logprobs=zeros, temperatures=zeros + 1, ce_weights=np.float32([0, 0, 0.5]))
      >>> {name: weights.tolist() for name, weights in resolved_weights(sample, sample.members()).items()}
      {'rl': [0, 1, 1], 'ce': [0.0, 0.0, 0.5]}
    """
    streams = {"rl": sample.rl_weights, "ce": sample.ce_weights, "ref_kl": sample.ref_kl_weights}
    # Note: an absent rl stream is 1.0 on its members; the members of another absent stream are none.
    return {
        name: member.astype(np.int8) if (stream := streams[name]) is None else np.where(member, stream, np.float32(0.0))
        for name, member in zip(streams, members, strict=True)
        if member.any()
    }


def trained_tokens(members: Members) -> np.ndarray:
    """Return [L] bool, True on the members of at least one loss component."""
    return members.rl | members.ce | members.ref_kl


def why_untrained(rollout: Rollout, branch: PlayedBranch) -> list[str | None]:
    """Return for each token of a branch why it is not trained; None for one that is a member of a loss component.

    A member whose advantage is 0 is trained: it counts in the denominator, and the rl loss still holds its probability
    near the one that it was sampled with.
    """
    num_tokens = sum(len(node.token_ids) for node in branch.nodes)
    if rollout.bucket != Bucket.TRAINED:
        return [str(rollout.bucket)] * num_tokens
    if branch.is_dropped:
        return [str(Bucket.OVERLONG_DROPPED)] * num_tokens
    words = [INPUT, MASKED, OTHER_BRANCH, ZERO_WEIGHT, None if rollout.training is Training.APPLIED else str(rollout.training), TRUNCATED]
    # What is written later counts.
    which = np.concatenate([is_sampled(node) for node in branch.nodes]).astype(np.int8)
    if any(branch.is_shared):
        which[_asked(branch) & _shared(branch)] = 2
    if branch.sample is not None and branch.members is not None:
        which[branch.sample.loss_mask] = 3
        which[trained_tokens(branch.members)] = 4
    if branch.packed is not None:
        which[branch.packed.num_tokens :] = 5
    return [words[index] for index in which.tolist()]


class TokenTexts(dict[int, str]):
    """The text of each token id, decoded once."""

    def __init__(self, decode_token: Callable[[int], str]) -> None:
        super().__init__()
        self._decode_token = decode_token

    def __missing__(self, token_id: int) -> str:
        """Decode an id that was not seen before."""
        text = self[token_id] = self._decode_token(token_id)
        return text
