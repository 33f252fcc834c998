"""Small real objects for tests: samples, rollouts, groups and micro-batches of a few tokens.

Everything has a sensible default, so a test names only what it is about. `make_micro_batch` lays samples out by a plain
loop and shares no code with the packer, so it can also serve as its oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl.batching import rollout_to_samples
from jaxrl.types import OPTIONAL_STREAMS, STREAM_FILL, Failure, Group, MicroBatch, Node, Rollout, Task, TrainingSample

Stream = float | Sequence[float] | np.ndarray | None


def _stream(values: Stream, loss_mask: np.ndarray) -> np.ndarray | None:
    if values is None:
        return None
    array = np.asarray(values, np.float32)
    return np.where(loss_mask, array, np.float32(0.0)).astype(np.float32) if array.ndim == 0 else array


def make_sample(
    num_prompt: int = 2,
    num_completion: int = 3,
    *,
    token_ids: Sequence[int] | np.ndarray | None = None,
    env_name: str = "toy",
    logprob: float = -0.5,
    temperature: float = 1.0,
    advantages: Stream = 1.0,
    rl_weights: Stream = None,
    ce_weights: Stream = None,
    ref_kl_weights: Stream = None,
    ref_logprobs: Stream = None,
) -> TrainingSample:
    """Return a sample of `num_prompt` context tokens and `num_completion` sampled ones.

    A stream given as a number holds it on the sampled tokens and 0.0 elsewhere; a sequence is taken verbatim; None is
    absent.
    """
    loss_mask = np.arange(num_prompt + num_completion) >= num_prompt
    ids = np.arange(1, len(loss_mask) + 1) if token_ids is None else np.asarray(token_ids)
    return TrainingSample(
        token_ids=ids.astype(np.int32),
        loss_mask=loss_mask,
        inference_logprobs=np.where(loss_mask, np.float32(logprob), np.float32(0.0)),
        temperatures=np.where(loss_mask, np.float32(temperature), np.float32(1.0)),
        env_name=env_name,
        advantages=_stream(advantages, loss_mask),
        rl_weights=_stream(rl_weights, loss_mask),
        ce_weights=_stream(ce_weights, loss_mask),
        ref_kl_weights=_stream(ref_kl_weights, loss_mask),
        ref_logprobs=_stream(ref_logprobs, loss_mask),
    )


def make_node(
    parent: int | None,
    token_ids: Sequence[int],
    *,
    num_sampled: int = 0,
    role: str | None = None,
    content: str | None = None,
    logprob: float | None = -0.5,
    version: int | None = 0,
    temperature: float = 1.0,
) -> Node:
    """Return an input node, or (with `num_sampled`) a policy's reply whose last `num_sampled` tokens were sampled.

    `logprob` None or `version` None leaves the array out: both None is a frozen source.
    """
    is_sampled = num_sampled > 0
    return Node(
        parent=parent,
        role=role or ("assistant" if is_sampled else "user"),
        content=" ".join(str(i) for i in token_ids) if content is None else content,
        token_ids=np.asarray(token_ids, np.int32),
        sampled=is_sampled,
        logprobs=np.full(num_sampled, logprob, np.float32) if is_sampled and logprob is not None else None,
        versions=np.full(num_sampled, version, np.int32) if is_sampled and version is not None else None,
        num_sampled=num_sampled,
        temperature=temperature,
        finish_reason="stop" if is_sampled else None,
    )


def make_rollout(
    reward: float | None = 1.0,
    *,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((1, 2), (3, 4, 5)),),
    env_name: str = "toy",
    task_id: str = "task-0",
    group_id: str = "toy/0",
    member: int = 0,
    draw_index: int = 0,
    content: str | None = None,
    logprob: float | None = -0.5,
    version: int | None = 0,
    temperature: float = 1.0,
    failure: Failure | None = None,
    with_samples: bool = True,
) -> Rollout:
    """Return a rollout of one branch; each turn is (prompt ids, sampled ids). `with_samples` fills its samples."""
    rollout = Rollout(
        task=Task(env_name=env_name, id=task_id, spec={"id": task_id}),
        group_id=group_id,
        member=member,
        draw_index=draw_index,
        reward=reward,
        failure=failure,
        stop_reason="done",
    )
    for prompt_ids, sampled_ids in turns:
        parent = len(rollout.nodes) - 1 if rollout.nodes else None
        rollout.nodes.append(make_node(parent, prompt_ids))
        rollout.nodes.append(
            make_node(
                len(rollout.nodes) - 1,
                sampled_ids,
                num_sampled=len(sampled_ids),
                content=content,
                logprob=logprob,
                version=version,
                temperature=temperature,
            )
        )
    if with_samples:
        rollout.samples = rollout_to_samples(rollout)
    return rollout


def make_group(
    rewards: Sequence[float | None],
    *,
    env_name: str = "toy",
    task_id: str = "task-0",
    draw_index: int = 0,
    version: int | None = 0,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((1, 2), (3, 4, 5)),),
    **rollout_settings: object,
) -> Group:
    """Return a complete group with one rollout per reward; further keywords go to `make_rollout`."""
    group_id = f"{env_name}/{draw_index}"
    rollouts = [
        make_rollout(
            reward,
            env_name=env_name,
            task_id=task_id,
            group_id=group_id,
            member=member,
            draw_index=draw_index,
            version=version,
            turns=turns,
            **rollout_settings,
        )
        for member, reward in enumerate(rewards)
    ]
    task = Task(env_name=env_name, id=task_id, spec={"id": task_id})
    return Group(group_id, task, draw_index, size=len(rollouts), version=version or 0, rollouts=rollouts)


def make_micro_batch(
    rows: Sequence[Sequence[TrainingSample]] | None = None, *, length: int = 8, max_segments: int = 4
) -> MicroBatch:
    """Lay out each row's samples one after another, with identity fills beside present streams and 0.0 in padding."""
    rows = [[make_sample()]] if rows is None else rows
    shape = (len(rows), length)
    present = {name for row in rows for sample in row for name in OPTIONAL_STREAMS if getattr(sample, name) is not None}
    batch = MicroBatch(
        token_ids=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        position_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        inference_logprobs=np.zeros(shape, np.float32),
        temperatures=np.ones(shape, np.float32),
        sample_index=np.full((len(rows), max_segments), -1, np.int32),
        **{name: np.zeros(shape, np.float32) for name in sorted(present)},
    )
    index = 0
    for r, row in enumerate(rows):
        start = 0
        for s, sample in enumerate(row):
            at = slice(start, start + len(sample))
            batch.segment_ids[r, at] = s + 1
            batch.position_ids[r, at] = np.arange(len(sample))
            for name in ("token_ids", "loss_mask", "inference_logprobs", "temperatures"):
                getattr(batch, name)[r, at] = getattr(sample, name)
            for name in present:
                stream = getattr(sample, name)
                getattr(batch, name)[r, at] = STREAM_FILL[name] if stream is None else stream
            batch.sample_index[r, s] = index
            index += 1
            start += len(sample)
        batch.position_ids[r, start:] = np.arange(length - start)
    return batch
