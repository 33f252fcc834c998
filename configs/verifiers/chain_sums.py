"""A taskset of the `verifiers` package: sums of `reasoning_gym`, the answer is worth 1 and anything else 0.

It knows nothing of jaxrl: `configs/verifiers.toml` trains on it, and so might anything else that plays verifiers. Its folder must be
importable (`PYTHONPATH=configs/verifiers`), since verifiers takes the name of a module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import reasoning_gym
import verifiers.v1 as vf

__all__ = ["ChainSums"]


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Answer a sum."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 for the answer and nothing else, after thinking if there was any."""
        return float(trace.last_reply.rpartition("</think>")[2].strip() == self.data.answer)

    @vf.metric
    async def reply_chars(self, trace: vf.Trace) -> float:
        """Return how long the reply is."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """Which sums."""

    min_terms: int = 3
    max_terms: int = 4
    num_items: int = 2000
    seed: int = 0
    split: Literal["train", "heldout"] = "train"


class ChainSums(vf.Taskset[SumTask, SumsConfig]):
    """Distinct sums of one-digit numbers, of which a tenth is held out by a hash of the question."""

    def load(self) -> Iterable[SumTask]:
        """Yield the sums of the split."""
        config = self.config
        items = reasoning_gym.create_dataset(
            "chain_sum",
            size=config.num_items,
            seed=config.seed,
            min_terms=config.min_terms,
            max_terms=config.max_terms,
            min_digits=1,
            max_digits=1,
        )
        for question, answer in {item["question"]: item["answer"] for item in items}.items():
            is_heldout = hashlib.sha256(question.encode()).digest()[0] < 26
            if is_heldout == (config.split == "heldout"):
                yield SumTask(SumData(prompt=question, answer=answer), config.task)
