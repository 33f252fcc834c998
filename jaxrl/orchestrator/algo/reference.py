"""What a reference model says of a rollout's own tokens, one logprob for each.

In: a pool that scores, the branches of a rollout, and what the reference is shown before them. Out: one stream per branch,
of its full length, at temperature 1. Numbers are never padded, cut or guessed: an answer of another length, or with a
number that is not finite, is an error. All branches are asked for at once; how many are on the way is for the pool to
bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from jaxrl.errors import EngineError, PromptTooLongError
from jaxrl.orchestrator.ports import ScoringPool
from jaxrl.types import Rollout, TrainingSample


async def score_branches(
    pool: ScoringPool,
    rollout: Rollout,
    *,
    context_ids: np.ndarray | None = None,
    bos_id: int | None = None,
    window: int | None = None,
) -> None:
    """Write `ref_logprobs` of every sample of a rollout, or of none if one of them cannot be scored.

    Args:
      pool: the reference.
      rollout: with samples.
      context_ids: [C] int32 that the reference reads before each branch; None for nothing.
      bos_id: the token that begins a conversation, once: a branch that begins with it as the context does is scored
        without it.
      window: the longest sequence that the reference holds; None if unknown.

    Raises:
      PromptTooLongError: context and branch together do not fit.
      EngineError: the reference refused, or gave other numbers than were asked for.
      DeadlineError: it did not answer in time.
    """
    context = np.zeros(0, np.int32) if context_ids is None else context_ids
    try:
        async with asyncio.TaskGroup() as scoring:
            tasks = [scoring.create_task(_score(pool, sample, context, bos_id, window)) for sample in rollout.samples]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    for sample, task in zip(rollout.samples, tasks, strict=True):
        sample.ref_logprobs = task.result()


async def _score(pool: ScoringPool, sample: TrainingSample, context: np.ndarray, bos_id: int | None, window: int | None) -> np.ndarray:
    """Return [L] float32 of a sample's [L] tokens; 0.0 for a first one that nothing stands before, or that is left out."""
    token_ids = sample.token_ids
    is_twice = bos_id is not None and len(context) > 0 and _starts_with(bos_id, context, token_ids)
    sequence = np.concatenate([context, token_ids[1:] if is_twice else token_ids]).astype(np.int32)
    if window is not None and len(sequence) > window:
        raise PromptTooLongError(
            f"{len(context)} tokens of context and {len(token_ids)} of the rollout are {len(sequence)} together, more than "
            f"the window of {window} that the reference holds; widen it (`inference.max_model_len`), or shorten what is shown before it, "
            "prompts or replies"
        )
    scores = np.asarray(await pool.score(sequence, 1.0))
    if scores.shape != sequence.shape:
        raise EngineError(f"the reference gave {list(scores.shape)} logprobs for {len(sequence)} tokens, expected one for each")
    if not np.isfinite(scores).all():
        place = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise EngineError(f"the reference's logprob of token {sequence[place]} at position {place} is {scores[place]}, not a finite number")
    mine = scores[len(context) :].astype(np.float32)
    return np.concatenate([np.zeros(1, np.float32), mine]) if is_twice else mine


def _starts_with(token_id: int, *sequences: Sequence[int] | np.ndarray) -> bool:
    return all(len(ids) > 0 and int(ids[0]) == token_id for ids in sequences)
