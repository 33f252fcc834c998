"""Crediting beside the main loop: whose hooks hold up whom, in which order groups are finished, what a failing hook costs."""

import asyncio
import random
import time

import msgspec
import numpy as np
import pytest

from jaxrl.blame import component_of_error
from jaxrl.config.algorithm import GRPOConfig
from jaxrl.config.filters import (
    GibberishFilterConfig,
    MinRewardFilterConfig,
    OverlongFilterConfig,
    ZeroAdvantageFilterConfig,
)
from jaxrl.errors import RunFailedError
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.algo import GRPO, Algorithm
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sink import MAX_SCORING_HOOKS, Sink
from jaxrl.orchestrator.sources import DemonstrationSource
from jaxrl.types import Boundary, Bucket, Group
from tests.builders import make_group, make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import ROW_LENGTH, make_env, make_run, renderer

BESIDE = ("dispatched", "pending", "truncated")
"""Counts of the ledger that are no end of a rollout."""


def _sink(**settings) -> Sink:
    defaults = {"is_ordered": False, "pre_batch_filters": [], "max_consecutive_failures": 9, "on_change": lambda: None}
    return Sink(Ledger(), StepTally(), **(defaults | settings))


def _opened(env, size: int, order: int = 0) -> OpenGroup:
    """Return a group of which nothing has arrived, with rollouts that were played."""
    played = make_group([float(member % 2) for member in range(size)], env_name=env.name, draw_index=order)
    waiting = Group(played.id, played.task, order, size=size, version=0)
    return OpenGroup(order, Draw(env.name, played.task.spec, order), env, waiting, played.rollouts, opened_at_s=0.0)


async def test_a_stuck_teacher_of_one_environment_holds_up_no_other():
    class Stuck(GRPO):
        async def score_rollout(self, rollout):
            await asyncio.sleep(60)

    pool, sink = ScriptedPool(), _sink()
    stuck = _opened(make_env(pool, ToyEnv("stuck"), algorithm=Stuck(GRPOConfig(), pool)), MAX_SCORING_HOOKS + 5)
    free = _opened(make_env(pool, ToyEnv("free")), 2, order=1)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(sink.add(stuck, rollout)) for rollout in stuck.members]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.add(free, rollout) for rollout in free.members))
        for task in waiting:
            task.cancel()
    assert list(sink.finished) == [free]


async def test_waiting_for_a_place_among_the_hooks_is_not_charged_to_the_hook():
    class Slow(GRPO):
        async def score_rollout(self, rollout):
            await asyncio.sleep(0.3)

    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool, algorithm=Slow(GRPOConfig(), pool), rollout_deadline_s=0.5), MAX_SCORING_HOOKS + 1)
    await asyncio.gather(*(sink.add(opened, rollout) for rollout in opened.members))
    assert [r.failure for r in opened.members] == [None] * (MAX_SCORING_HOOKS + 1)


async def test_members_arrive_in_any_order_and_stand_in_member_order_when_they_are_credited():
    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool), 4)
    for member in (2, 0, 3, 1):
        await sink.add(opened, opened.members[member])
    assert [r.member for r in opened.group] == [0, 1, 2, 3]
    assert [r.mean_advantage() for r in opened.group] == [-0.5, 0.5, -0.5, 0.5]
    assert list(sink.finished) == [opened]


async def test_in_draw_order_a_group_is_credited_after_the_one_before_it_or_when_that_is_dropped():
    pool, sink = ScriptedPool(), _sink(is_ordered=True)
    env = make_env(pool)
    first, second, third = (_opened(env, 2, order) for order in range(3))
    for opened in (first, second, third):
        sink.expect(opened)
    async with asyncio.TaskGroup() as tasks:
        for opened in (third, second):
            for rollout in opened.members:
                tasks.create_task(sink.add(opened, rollout))
        await asyncio.sleep(0.01)
        assert not sink.finished
        first.is_dropped = True
        first.finished.set()
    assert list(sink.finished) == [second, third]


async def test_a_missing_sampling_logprob_is_a_failure_of_the_policy():
    pool, sink = ScriptedPool(), _sink()
    opened = _opened(make_env(pool), 1)
    opened.members[0] = rollout = make_rollout(1.0, with_samples=False)
    rollout.nodes[-1].logprobs = None
    await sink.add(opened, rollout)
    assert (rollout.failure.boundary, rollout.failure.type, rollout.reward) == (Boundary.POLICY, "SampleError", None)


async def test_the_task_sampler_learns_rewards_and_costs_of_a_group_before_any_filter():
    seen = []
    pool, sink = ScriptedPool(), _sink()
    env = make_env(pool)
    env.tasks.update = lambda spec, rewards, costs: seen.append((spec, rewards, costs))
    opened = _opened(env, 3)
    opened.members[1].reward = None
    sink._ledger.dispatch(3)
    for rollout in opened.members:
        await sink.add(opened, rollout)
    kept = sink.commit(opened)
    assert seen == [({"id": "task-0"}, [0.0, None, 0.0], [3.0, 3.0, 3.0])]
    assert [r.member for r in kept.rollouts] == [0, 2]
    assert [r.bucket for r in opened.members] == ["pending", "unscored", "pending"]


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
async def test_a_dead_teacher_next_to_a_healthy_environment_ends_the_run_and_is_named(hook):
    class Teacherless(GRPO):
        pass

    async def score(self, scored):
        raise ConnectionError("teacher is down")

    setattr(Teacherless, hook, score)

    def envs(pool):
        return [make_env(pool, ToyEnv("healthy")), make_env(pool, ToyEnv("orphan"), algorithm=Teacherless(GRPOConfig(), pool))]

    run = make_run(envs=envs, max_steps=50, max_consecutive_failures=24)
    with pytest.raises(RunFailedError, match=r"24 rollouts in a row .* 'orphan'.*is down \(test_sink\.py, line \d+, in score\)") as caught:
        await run.play()
    assert component_of_error(caught.value) == "algorithm of environment 'orphan'"
    assert run.batches, "the healthy one was trained on meanwhile"


async def test_a_stuck_hook_holds_up_no_batch_of_another_environment():
    """The hooks of one environment end only when a batch of the other has been trained on."""
    shipped, loop = asyncio.Event(), asyncio.get_running_loop()

    class Stuck(GRPO):
        async def score_rollout(self, rollout):
            await shipped.wait()

    def envs(pool):
        return [make_env(pool, ToyEnv("stuck"), algorithm=Stuck(GRPOConfig(), pool)), make_env(pool, ToyEnv("free"))]

    run = make_run(
        envs=envs,
        async_level=1,
        max_steps=3,
        max_inflight_groups=8,
        on_applied=lambda step: loop.call_soon_threadsafe(shipped.set),
    )
    await asyncio.wait_for(run.play(), 10)
    trained = [[r.env_name for r in rollouts if r.bucket == "trained"] for rollouts in run.monitors.rollouts.values()]
    assert set(trained[0]) == {"free"} and "stuck" in {name for names in trained[1:] for name in names}


def _arrays(batches) -> list[dict]:
    """Return every array of every micro-batch, with the counts, as bytes."""
    return [
        {
            f"{index}/{name}": None if value is None else (value.shape, value.dtype, value.tobytes())
            for index, part in enumerate([batch, *batch.micro_batches])
            for name, value in msgspec.structs.asdict(part).items()
            if value is None or isinstance(value, np.ndarray)
        }
        for batch in batches
    ]


async def test_a_synchronous_batch_is_the_same_bit_for_bit_however_long_scoring_takes():
    async def play(seed: int):
        latency, started = random.Random(seed), time.monotonic()
        credited: list[str] = []

        class Teacher(GRPO):
            async def score_rollout(self, rollout):
                await asyncio.sleep(latency.random() * 0.01)
                # What the teacher says depends on the rollout alone.
                score = -float(len(rollout.completion_text)) - 0.1 * rollout.member
                for sample in rollout.samples:
                    sample.ref_logprobs = np.where(sample.loss_mask, np.float32(score), np.float32(0))
                    sample.ref_kl_weights = 0.5 * sample.loss_mask.astype(np.float32)

            async def score_group(self, rollouts):
                await asyncio.sleep(latency.random() * 0.01)
                credited.append(rollouts[0].group_id)
                await super().score_group(rollouts)

        def envs(pool):
            return [make_env(pool, ToyEnv(name, num_tasks=5), algorithm=Teacher(GRPOConfig(), pool)) for name in ("left", "right")]

        run = make_run(envs=envs, batch_size=16, pre_batch_filters=[ZeroAdvantageFilterConfig()], max_inflight_groups=3)
        await run.play()
        assert time.monotonic() - started < 10
        return _arrays(run.batches), credited

    runs = [await play(seed) for seed in (1, 2, 3)]
    assert len(runs[0][0]) == 3 and len(runs[0][0][0]) > 10
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("loss_type", ["rl", "ce"])
async def test_a_rollout_without_a_reward_is_not_trained_on_whichever_loss_its_tokens_feed(loss_type, is_live):
    class Imitating(Algorithm):
        action_loss_type = loss_type

        async def score_group(self, rollouts):
            for rollout in rollouts:
                rollout.assign_advantages(0.0)

    pool, sink = ScriptedPool(), _sink()
    source = None if is_live else DemonstrationSource(renderer(), lambda spec: "an answer", ROW_LENGTH)
    env = make_env(pool, algorithm=Imitating(GRPOConfig(), pool), source=source)
    env.tasks.update = lambda spec, rewards, costs: None
    opened = _opened(env, 2)
    opened.members[1].reward = None
    sink._ledger.dispatch(2)
    for rollout in opened.members:
        await sink.add(opened, rollout)
    kept = sink.commit(opened)
    assert [r.member for r in kept.rollouts] == [0]
    assert [r.bucket for r in opened.members] == ["pending", "unscored"]
    assert opened.members[1].samples[0].advantages is None, "it is in no baseline either"


async def test_every_rollout_that_a_filter_drops_is_in_its_bucket_and_the_sums_hold():
    before = [MinRewardFilterConfig(threshold=0.3), OverlongFilterConfig(max_completion_tokens=4)]
    after = [ZeroAdvantageFilterConfig(enforce=False), OverlongFilterConfig(max_completion_tokens=3), GibberishFilterConfig()]
    run = make_run(max_steps=4, pre_batch_filters=before, post_batch_filters=after)
    await run.play()
    played = [rollout for rollouts in run.monitors.rollouts.values() for rollout in rollouts]
    for rollout in played:
        expected = (
            "filtered/min_reward" if rollout.reward < 0.3 else "filtered/overlong" if rollout.num_completion_tokens > 3 else Bucket.TRAINED
        )
        assert rollout.bucket == expected
    _, last = run.monitors.steps[-1]
    ends = {name: count for name, count in last.items() if name.startswith("ledger/") and name.split("/")[1] not in BESIDE}
    assert sum(ends.values()) == last["ledger/dispatched"] == len(played) and last["ledger/pending"] == 0
    assert ends["ledger/filtered/min_reward"] > 0 and ends["ledger/filtered/overlong"] > 0 and ends["ledger/trained"] > 0
    assert ends["ledger/filtered/zero_advantage"] == ends["ledger/filtered/gibberish"] == 0, "they have a column all the same"
    assert {"filters/min_reward/frac", "filters/overlong/frac", "filters/zero_advantage/frac"} <= set(last)
    assert last["filters/gibberish/frac"] == 0


async def test_environments_trained_by_different_components_share_a_step_and_are_counted_apart():
    class Imitating(GRPO):
        action_loss_type = "ce"

    def envs(pool):
        return [make_env(pool, ToyEnv("played")), make_env(pool, ToyEnv("imitated"), algorithm=Imitating(GRPOConfig(), pool))]

    run = make_run(envs=envs, batch_size=16, max_steps=1)
    await run.play()
    _, row = run.monitors.steps[0]
    counts = run.batches[0].member_counts.sum(0)
    assert [row["tokens/rl/played"], row["tokens/ce/imitated"], 0] == counts.tolist() and counts[0] > 0 < counts[1]
    assert "tokens/ce/played" not in row and "tokens/rl/imitated" not in row
    for name in ("rollout/reward/mean", "rollout/completion_tokens/mean"):
        assert row[f"{name}/played"] != row[f"{name}/imitated"]
