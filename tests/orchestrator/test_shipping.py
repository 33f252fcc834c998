"""`jaxrl.orchestrator.shipping`: every sample of a trained rollout knows its place in the batch, also beside samples that did not fit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from jaxrl.batching import pack, rollout_to_samples
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import KeptGroup, OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.shipping import BatchMaker, ShippedStep
from jaxrl.orchestrator.sink import Sink
from jaxrl.types import Group, Rollout, StepReport
from tests.builders import make_node, make_rollout
from tests.fakes import ScriptedPool
from tests.orchestrator.wiring import make_env

ROW_LENGTH = 6


def rollout_of(first_id: int, *reply_lengths: int, prompt_length: int = 2) -> Rollout:
    """Return a rollout of a prompt and one branch for each reply."""
    rollout = make_rollout(turns=(), with_samples=False)
    rollout.nodes.append(make_node(None, range(first_id, first_id + prompt_length)))
    for number, length in enumerate(reply_lengths, start=1):
        rollout.nodes.append(make_node(0, range(first_id + 10 * number, first_id + 10 * number + length), num_sampled=length))
    rollout.samples = rollout_to_samples(rollout)
    rollout.assign_advantages(1.0)
    return rollout


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
async def test_samples_are_numbered_as_the_packer_numbers_them(overlong) -> None:
    ledger = Ledger()
    sink = Sink(ledger, StepTally(), is_ordered=False, pre_batch_filters=[], max_consecutive_failures=9, on_change=lambda: None)
    maker = BatchMaker(
        sink, partial(pack, row_length=ROW_LENGTH, rows=1, shards=1, overlong=overlong), post_batch_filters=[], row_length=ROW_LENGTH,
        overlong=overlong,
    )  # fmt: skip
    nothing_left = rollout_of(500, 1, prompt_length=ROW_LENGTH)
    groups = [[rollout_of(100, 2), rollout_of(200, 5, 3)], [nothing_left, rollout_of(300, 9), rollout_of(400, 1, 6, 4)]]
    ledger.dispatch(5)
    env = make_env(ScriptedPool())
    kept = []
    for order, rollouts in enumerate(groups):
        task = rollouts[0].task
        opened = OpenGroup(order, Draw(env.name, task.spec, order), env, Group("g", task, order, 2, 0), rollouts, opened_at_s=0.0)
        kept.append(KeptGroup(opened, rollouts))
    made = await maker.make(1, kept)
    assert made is not None
    batch, _ = made
    packed = [[None if p is None else (p.index, p.num_tokens) for p in rollout.packed] for rollouts in groups for rollout in rollouts]
    if overlong == "drop":
        assert packed == [[(0, 4)], [None, (1, 5)], [], [], [(2, 3), None, (3, 6)]]
    else:
        assert packed == [[(0, 4)], [(1, 6), (2, 5)], [], [(4, 6)], [(5, 3), (6, 6), (7, 6)]]
    # A sample that was cut before its first reply token is in the batch, but its rollout is not trained.
    buckets = ["trained" if rollout.packed else "overlong_dropped" for rollouts in groups for rollout in rollouts]
    assert [rollout.bucket for rollouts in groups for rollout in rollouts] == buckets
    rollouts = [rollout for group in groups for rollout in group]
    # The trainer's numbers are the token ids themselves: each must come home to its own token.
    ids = [np.zeros(0, np.float32)] * batch.num_samples
    for micro_batch in batch.micro_batches:
        for row, segment in np.argwhere(micro_batch.sample_index >= 0):
            own = micro_batch.segment_ids[row] == segment + 1
            ids[micro_batch.sample_index[row, segment]] = micro_batch.token_ids[row, own].astype(np.float32)
    ShippedStep(1, {}, rollouts[::-1]).take(StepReport(step=1, version=1, skipped=False, metrics={}, token_logprobs=ids))
    for rollout in rollouts:
        for sample, place in zip(rollout.samples, rollout.packed, strict=bool(rollout.packed)):
            if place is not None:
                assert place.trainer_logprobs is not None
                assert place.trainer_logprobs.tolist() == sample.token_ids[: place.num_tokens].tolist()
