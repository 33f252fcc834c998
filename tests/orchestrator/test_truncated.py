"""What `truncated` makes of a rollout that a limit cut short: in the baseline, in the batch, in the ledger and for the task sampler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxrl.config.algorithm import GRPOConfig, OPSDConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.orchestrator.algo import GRPO, Algorithm
from jaxrl.orchestrator.sources import DemonstrationSource
from jaxrl.types import Bucket
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.test_sink import _opened, _sink
from tests.orchestrator.wiring import ROW_LENGTH, make_env, make_run, renderer

CUT = (1, 2)
"""Members of a group of 4, with rewards 0, 1, 0, 1, that a limit cut."""


async def credited(truncated, algorithm=None, **settings):
    """Return a committed group of 4 with what was kept of it and what its task sampler was told; nothing else may be left pending."""
    seen = []
    sink = _sink()
    env = replace(make_env(ScriptedPool(), algorithm=algorithm, **settings), truncated=truncated)
    env.tasks.update = lambda spec, rewards, costs: seen.append((rewards, costs))
    opened = _opened(env, 4)
    sink._ledger.dispatch(4)
    for rollout in opened.members:
        rollout.samples = []
        rollout.is_truncated = rollout.member in CUT
        await sink.add(opened, rollout)
    kept = sink.commit(opened)
    sink._ledger.check(0 if kept is None else len(kept.rollouts))
    return opened.members, [] if kept is None else kept.rollouts, seen[0], sink._tally.metrics()


async def test_train_treats_it_like_any_other():
    members, kept, (rewards, _), metrics = await credited("train")
    assert kept == members and [r.mean_advantage() for r in members] == [-0.5, 0.5, -0.5, 0.5]
    assert rewards == [0.0, 1.0, 0.0, 1.0]
    assert "filters/truncated/frac" not in metrics


async def test_mask_counts_it_in_the_baseline_and_trains_none_of_its_tokens():
    members, kept, (rewards, _), metrics = await credited("mask")
    assert [r.member for r in kept] == [0, 3]
    assert [r.mean_advantage() for r in kept] == [-0.5, 0.5], "the mean is that of all four, 0.5"
    for rollout in (members[member] for member in CUT):
        assert (rollout.bucket, rollout.failure, rollout.is_frozen) == ("filtered/truncated", None, True)
        assert not any(member.any() for sample in rollout.samples for member in sample.members())
        assert rollout.mean_advantage() is None, "no token has it"
    assert rewards == [0.0, 1.0, 0.0, 1.0], "a reward as any other"
    assert (metrics["filters/truncated/frac"], metrics["rollout/reward/mean"], metrics["group/partial_frac"]) == (0.5, 0.5, 0.0)


async def test_drop_leaves_it_out_of_the_group_and_keeps_its_reward_in_the_log():
    members, kept, (rewards, costs), metrics = await credited("drop")
    assert [r.member for r in kept] == [0, 3]
    assert [r.mean_advantage() for r in kept] == [-0.5, 0.5], "the mean of 0 and 1"
    assert [members[member].bucket for member in CUT] == ["filtered/truncated"] * 2
    assert [members[member].reward for member in CUT] == [1.0, 0.0] and [r.samples for r in members if r.member in CUT] == [[], []]
    assert rewards == [0.0, None, None, 1.0] and costs == [3.0] * 4, "its tokens were paid for, and its group learns nothing from it"
    assert (metrics["filters/truncated/frac"], metrics["rollout/reward/mean"], metrics["group/partial_frac"]) == (0.5, 0.5, 1.0)


async def test_the_baseline_of_a_group_differs_between_mask_and_drop():
    class Uneven(GRPO):
        async def score_group(self, rollouts):
            for rollout in rollouts:
                rollout.reward = 4.0 if rollout.member == 1 else 0.0
            await super().score_group(rollouts)

    masked, *_ = await credited("mask", Uneven(GRPOConfig(), ScriptedPool()))
    dropped, *_ = await credited("drop", Uneven(GRPOConfig(), ScriptedPool()))
    assert [masked[member].mean_advantage() for member in (0, 3)] == [-1.0, -1.0], "the mean is 1"
    assert [dropped[member].mean_advantage() for member in (0, 3)] == [0.0, 0.0]


async def test_a_dropped_one_is_asked_about_by_no_hook_and_a_masked_one_is():
    seen = []

    class Watching(GRPO):
        async def score_rollout(self, rollout):
            seen.append(rollout.member)

    for truncated, expected in (("drop", [0, 3]), ("mask", [0, 1, 2, 3])):
        seen.clear()
        await credited(truncated, Watching(GRPOConfig(), ScriptedPool()))
        assert seen == expected


async def test_what_the_environment_said_may_still_be_learned_from_a_masked_one():
    class Listening(GRPO):
        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                sample.ce_weights = np.array([0, 0.5, 0, 0, 0], np.float32)

    members, kept, _, _ = await credited("mask", Listening(GRPOConfig(), ScriptedPool()))
    assert kept == members
    assert [[int(member.sum()) for member in r.samples[0].members()] for r in members] == [[3, 1, 0], [0, 1, 0], [0, 1, 0], [3, 1, 0]]


@pytest.mark.parametrize("loss_type", ["ce", "ref_kl"])
async def test_mask_holds_for_every_loss(loss_type):
    class Other(Algorithm):
        action_loss_type = loss_type

        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                sample.ref_logprobs = np.zeros(len(sample), np.float32)

    source = DemonstrationSource(renderer(), lambda spec: "an answer", ROW_LENGTH)
    members, kept, _, _ = await credited("mask", Other(OPSDConfig(), ScriptedPool()), source=source)
    assert [r.member for r in kept] == [0, 3]
    assert [r.bucket for r in members] == ["pending", "filtered/truncated", "filtered/truncated", "pending"]


@pytest.mark.parametrize("truncated", ["mask", "drop"])
async def test_a_failed_or_unscored_one_stays_what_it_is(truncated):
    class Failing(GRPO):
        async def score_group(self, rollouts):
            await super().score_group(rollouts)
            for rollout in rollouts:
                if rollout.member == 1:
                    rollout.samples[0].ce_weights = np.ones(1, np.float32)

    sink, env = _sink(), replace(make_env(ScriptedPool(), algorithm=Failing(GRPOConfig(), ScriptedPool())), truncated=truncated)
    env.tasks.update = lambda spec, rewards, costs: None
    opened = _opened(env, 4)
    opened.members[2].reward = None
    sink._ledger.dispatch(4)
    for rollout in opened.members:
        rollout.samples = []
        rollout.is_truncated = rollout.member in CUT
        await sink.add(opened, rollout)
    sink.commit(opened)
    assert opened.members[2].bucket == Bucket.UNSCORED
    assert opened.members[1].bucket == (Bucket.ERRORED if truncated == "mask" else "filtered/truncated")


@pytest.mark.parametrize("truncated", ["mask", "drop"])
async def test_the_ledger_of_a_run_adds_up_each_step_and_has_a_column_for_them(truncated):
    def envs(pool):
        return [replace(make_env(pool), truncated=truncated), make_env(pool, ToyEnv("other"))]

    run = make_run(envs=envs, max_steps=4, batch_size=16, pre_batch_filters=[ZeroAdvantageFilterConfig()])
    played = run.envs[0].sampler.environment.play

    async def play(spec, session):
        outcome = await played(spec, session)
        return replace(outcome, is_truncated=outcome.reward < 0.4)

    run.envs[0].sampler.environment.play = play
    await run.play()
    rollouts = [rollout for step in run.monitors.rollouts.values() for rollout in step]
    cut = [rollout for rollout in rollouts if rollout.is_truncated]
    assert cut and {rollout.bucket for rollout in cut} == {"filtered/truncated"}
    assert all(rollout.reward is not None for rollout in cut)
    assert len({rollout.bucket for rollout in rollouts}) >= 2
    for _, row in run.monitors.steps:
        ends = {name for name in row if name.startswith("ledger/")} - {f"ledger/{name}" for name in ("dispatched", "pending", "truncated")}
        assert sum(row[name] for name in ends) + row["ledger/pending"] == row["ledger/dispatched"]
        assert "ledger/filtered/truncated" in row and 0 <= row["filters/truncated/frac"] < 1
    assert run.bucket_total("filtered/truncated") == len(cut) == run.bucket_total("truncated")
