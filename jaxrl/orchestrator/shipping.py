"""Makes the batch of a step out of the groups that were collected for it.

In: kept groups. Out: a packed `TrainBatch`, with every rollout in it decided, or None when nothing is left to train on.
Replacing an empty batch and sending a full one are the orchestrator's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxrl.orchestrator.filters import Filter
from jaxrl.orchestrator.groups import KeptGroup
from jaxrl.orchestrator.ports import Pack
from jaxrl.orchestrator.sink import Sink
from jaxrl.types import Bucket, PackedSample, Rollout, StepReport, TrainBatch, Training, TrainingSample


@dataclass(frozen=True, slots=True)
class ShippedStep:
    """What is known of a step when its batch goes to the trainer."""

    step: int
    metrics: dict[str, float]
    rollouts: list[Rollout]
    """Every rollout that was decided while the step was collected, in draw order, then by member."""

    def take(self, report: StepReport) -> None:
        """Write on the step's trained rollouts what the trainer reports of it."""
        for rollout in self.rollouts:
            if rollout.bucket != Bucket.TRAINED:
                continue
            rollout.training = Training.SKIPPED if report.skipped else Training.APPLIED
            for packed in rollout.packed:
                if packed is not None and report.token_logprobs is not None:
                    packed.trainer_logprobs = report.token_logprobs[packed.index]


class BatchMaker:
    """Filters, packs and decides."""

    def __init__(
        self,
        sink: Sink,
        pack: Pack,
        *,
        post_batch_filters: Sequence[Filter],
        row_length: int,
        overlong: Literal["drop", "truncate"],
    ) -> None:
        self._sink = sink
        self._pack = pack
        self._filters = post_batch_filters
        self._row_length = row_length
        self._is_dropping = overlong == "drop"

    async def make(self, step: int, groups: Sequence[KeptGroup]) -> tuple[TrainBatch, list[Rollout]] | None:
        """Pack the batch of `step` in a worker thread, and decide its rollouts by what the packer did.

        A rollout is trained if the packer took one of its samples and, where that had to be cut, left a token of it that feeds a
        loss; else it is dropped as overlong. A trained one is told which packed samples are its own.

        Args:
          step: the 1-based step.
          groups: what was collected for it.

        Returns:
          The batch and the rollouts that it trains on; None if nothing was left to train on.
        """
        groups = self._sink.filter(groups, self._filters)
        samples = [sample for group in groups for rollout in group.rollouts for sample in rollout.samples]
        batch: TrainBatch | None = None
        if any(len(sample) <= self._row_length or not self._is_dropping for sample in samples):
            batch = await asyncio.to_thread(self._pack, samples, step=step)
        # Note: cutting may have left no token that feeds a loss; such a batch would be a step of nothing.
        is_empty = batch is None or batch.num_loss_tokens == 0
        dropped = set(batch.overlong) if batch is not None and self._is_dropping else set()
        trained: list[Rollout] = []
        index = num_packed = 0
        for group in groups:
            for rollout in group.rollouts:
                packed: list[PackedSample | None] = []
                for sample in rollout.samples:
                    is_dropped = index in dropped
                    packed.append(None if is_dropped else PackedSample(num_packed, min(len(sample), self._row_length)))
                    num_packed += not is_dropped
                    index += 1
                is_trained = not is_empty and any(map(_is_fed, rollout.samples, packed))
                self._sink.decide(group.source, [rollout], Bucket.TRAINED if is_trained else Bucket.OVERLONG_DROPPED)
                if is_trained:
                    rollout.packed = packed
                    trained.append(rollout)
        return None if batch is None or is_empty else (batch, trained)


def _is_fed(sample: TrainingSample, packed: PackedSample | None) -> bool:
    """Say whether a sample is in the batch and, if it had to be cut, whether a token that feeds a loss is left of it."""
    if packed is None or packed.num_tokens == len(sample):
        return packed is not None
    return any(member.any() for member in sample.members(packed.num_tokens))
