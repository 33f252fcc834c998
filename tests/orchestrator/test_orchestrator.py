"""The whole pipeline on fakes: what is shipped, in which order, and where every rollout ends."""

import asyncio
import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest

from jaxrl.blame import component_of_error
from jaxrl.config.algorithm import GRPOConfig
from jaxrl.config.env import SamplingConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.errors import CheckpointError, DeadlineError, EngineError, RunFailedError
from jaxrl.orchestrator.algo import GRPO
from jaxrl.types import Boundary, Bucket
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env, make_run, rollout_of

ZERO = ZeroAdvantageFilterConfig()


def jitter(seed: int, longest_s: float = 0.004):
    """Return a latency that differs from request to request and from seed to seed."""
    generator = random.Random(seed)
    return lambda request: generator.random() * longest_s


async def test_a_synchronous_run_ships_every_step_on_policy():
    run = make_run(max_steps=3)
    await run.play()
    assert [batch.step for batch in run.batches] == [1, 2, 3]
    assert [batch.num_samples for batch in run.batches] == [8, 8, 8]
    assert [step for step, _ in run.monitors.steps] == [1, 2, 3]
    for step, metrics in run.monitors.steps:
        assert metrics["policy/staleness_steps/max"] == 0
        assert metrics["policy/version"] == step
        assert metrics["loss/total"] == 0.5
        assert metrics["ledger/trained"] == metrics["ledger/dispatched"] == 8 * step
        assert metrics["throughput/generated_tokens_per_s"] > 0
        assert {
            "time/step_s",
            "time/generate_s",
            "time/wait_for_policy_s",
            "time/pack_s",
            "tasks/toy/groups",
        } <= metrics.keys()
    told = [done for phase, done, total in run.monitors.progressed if (phase, total) == ("generating", 2)]
    assert list(dict.fromkeys(told[:3])) == [0, 1] and told.count(2) == 3, "from the moment at which a step's first group is dispatched"
    assert run.pool.versions_seen == [0, 1, 2, 3]
    assert run.orchestrator.snapshot() == run.orchestrator.snapshot(3)
    with pytest.raises(CheckpointError, match=r"no snapshot of step 2, only of \[3\]"):
        run.orchestrator.snapshot(2)


async def test_every_rollout_of_a_step_is_written_down_in_draw_order():
    run = make_run(pool=ScriptedPool(latency=jitter(3)), max_steps=2)
    await run.play()
    for step, rollouts in run.monitors.rollouts.items():
        first = 2 * (step - 1)
        assert [(r.draw_index, r.member) for r in rollouts] == [(d, m) for d in (first, first + 1) for m in range(4)]
        assert {r.bucket for r in rollouts} == {Bucket.TRAINED}


async def test_members_of_a_group_and_repeated_draws_are_sampled_apart():
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(num_tasks=1))], max_steps=3)
    await run.play()
    seeds = [request.sampling.seed for request in run.pool.endpoint.requests]
    assert len(set(seeds)) == len(seeds) == 24


async def test_groups_commit_in_draw_order_however_they_complete():
    """Each group takes longer than the one drawn after it, so they complete in reverse."""
    seen: list[str] = []
    credited: list[int] = []
    pool = ScriptedPool()
    environment = ToyEnv(num_tasks=8)
    delays = {}

    async def slow_first(spec):
        delays.setdefault(spec["id"], 0.05 / (1 + len(delays)))
        await asyncio.sleep(delays[spec["id"]])

    environment.before_play = slow_first

    class Ordered(GRPO):
        async def score_group(self, rollouts):
            credited.append(rollouts[0].draw_index)
            await super().score_group(rollouts)

    env = make_env(pool, environment, algorithm=Ordered(GRPOConfig(), pool))
    run = make_run(pool=pool, envs=lambda pool: [env], max_steps=2, batch_size=16)
    update = env.tasks.update

    def watching_update(spec, rewards, costs):
        seen.append(spec["id"])
        update(spec, rewards, costs)

    env.tasks.update = watching_update
    await run.play()
    assert credited == list(range(8))
    assert seen == [r.task.id for step in (1, 2) for r in run.monitors.rollouts[step] if r.member == 0]


async def test_what_a_synchronous_batch_holds_never_depends_on_timing():
    def play(seed: int):
        environment = ToyEnv(reward=lambda text: float(len(text) == 4))  # groups without signal are replaced
        pool = ScriptedPool(latency=jitter(seed))
        return make_run(
            pool=pool,
            envs=lambda pool: [make_env(pool, environment)],
            pre_batch_filters=[ZERO],
            max_inflight_groups=2,
            batch_size=16,
        )

    runs = [play(seed) for seed in (1, 2, 3)]
    for run in runs:
        await run.play()
    texts = [
        [
            (r.group_id, r.member, r.completion_text, r.bucket)
            for s in sorted(run.monitors.rollouts)
            for r in run.monitors.rollouts[s]
        ]
        for run in runs
    ]
    assert texts[0] == texts[1] == texts[2]
    assert any(bucket == "filtered/zero_advantage" for *_, bucket in texts[0])


async def test_groups_without_signal_are_replaced_before_the_batch_and_not_after():
    rewards = {"toy-0": 1.0, "toy-1": 1.0}

    class Half(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            return type(outcome)(reward=rewards.get(spec["id"], outcome.reward))

    before = make_run(envs=lambda pool: [make_env(pool, Half(num_tasks=4))], pre_batch_filters=[ZERO], max_steps=4)
    await before.play()
    assert all(
        len({r.group_id for r in rollouts if r.bucket == "trained"}) == 2
        for rollouts in before.monitors.rollouts.values()
    )
    after = make_run(envs=lambda pool: [make_env(pool, Half(num_tasks=4))], post_batch_filters=[ZERO], max_steps=4)
    await after.play()
    assert before.bucket_total("filtered/zero_advantage") >= 8
    assert after.bucket_total("dispatched") == 32 < before.bucket_total("dispatched")
    assert after.bucket_total("trained") + after.bucket_total("filtered/zero_advantage") == 32
    assert after.monitors.steps[0][1]["filters/zero_advantage/frac"] > 0


async def test_a_partial_group_trains_on_its_survivors():
    class Flaky(ToyEnv):
        async def play(self, spec, session):
            if rollout_of(session).member == 3:
                raise ValueError("the simulator fell over")
            return await super().play(spec, session)

    run = make_run(envs=lambda pool: [make_env(pool, Flaky())], max_steps=2)
    await run.play()
    assert [batch.num_samples for batch in run.batches] == [6, 6]
    assert run.bucket_total("errored") == 4
    failed = [r for r in run.monitors.rollouts[1] if r.bucket == "errored"]
    assert [(r.member, r.reward, r.failure.boundary) for r in failed] == [(3, None, Boundary.ENV)] * 2
    assert run.envs[0].tasks.metrics()["missing_rewards"] == 4
    assert [metrics["group/partial_frac"] for _, metrics in run.monitors.steps] == [1.0, 1.0], "and the run says so"
    survivors = [r for r in run.monitors.rollouts[1] if r.draw_index == 0 and r.member < 3]
    mean = sum(r.reward for r in survivors) / 3
    assert [r.mean_advantage() for r in survivors] == pytest.approx([r.reward - mean for r in survivors])


async def test_an_unscored_rollout_is_in_its_own_bucket_and_in_no_baseline():
    run = make_run(
        envs=lambda pool: [make_env(pool, ToyEnv(reward=lambda text: None if len(text) == 1 else float(len(text))))],
        max_steps=2,
    )
    await run.play()
    unscored = [r for rollouts in run.monitors.rollouts.values() for r in rollouts if r.bucket == "unscored"]
    assert unscored and all(r.reward is None and r.failure is None and r.mean_advantage() is None for r in unscored)
    assert run.bucket_total("unscored") == len(unscored)


async def test_a_rollout_without_a_policy_token_is_an_error():
    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(num_turns=0))], max_consecutive_failures=4)
    with pytest.raises(RunFailedError, match="EmptyRollout"):
        await run.play()


async def test_an_environment_that_always_raises_ends_the_run_with_its_last_failure():
    async def broken(spec):
        raise ConnectionError("no sandbox left")

    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(before_play=broken))], max_consecutive_failures=12)
    with pytest.raises(RunFailedError, match=r"12 rollouts in a row failed.*'env': ConnectionError: no sandbox left"):
        await run.play()
    assert run.batches == []
    assert all(r.bucket in ("errored", "cancelled") for r in run.monitors.rollouts[1])


async def test_a_policy_that_refuses_every_request_ends_the_run():
    run = make_run(max_consecutive_failures=8)
    run.pool.endpoint.failure = EngineError("out of memory")
    with pytest.raises(RunFailedError, match=r"'policy': EngineError: out of memory"):
        await run.play()


async def test_a_hanging_rollout_is_a_timeout_and_its_group_goes_on_without_it():
    async def hang_once(spec):
        if not hung:
            hung.append(spec)
            await asyncio.sleep(60)

    hung: list = []
    run = make_run(
        envs=lambda pool: [make_env(pool, ToyEnv(before_play=hang_once), rollout_deadline_s=0.2)], max_steps=2
    )
    await run.play()
    failures = [r.failure for r in run.monitors.rollouts[1] if r.failure]
    assert [f.boundary for f in failures] == [Boundary.TIMEOUT]
    assert [batch.num_samples for batch in run.batches] == [7, 8]


async def test_a_request_that_its_endpoint_cancels_does_not_strand_the_group():
    class Cancelling(ScriptedPool):
        async def generate(self, request):
            if request.request_id.endswith("/2/0"):
                raise asyncio.CancelledError
            return await super().generate(request)

    run = make_run(pool=Cancelling(), max_steps=2)
    await asyncio.wait_for(run.play(), 10)
    assert [batch.num_samples for batch in run.batches] == [6, 6]
    assert run.bucket_total("errored") == 4


@pytest.mark.parametrize("hook", ["score_rollout", "score_group"])
async def test_a_failing_scoring_hook_fails_rollouts_and_not_the_run(hook):
    class Teacherless(GRPO):
        async def score_rollout(self, rollout):
            if hook == "score_rollout" and rollout.member == 1:
                raise ConnectionError("teacher is down")

        async def score_group(self, rollouts):
            if hook == "score_group" and rollouts[0].draw_index == 0:
                raise ConnectionError("teacher is down")
            await super().score_group(rollouts)

    pool = ScriptedPool()
    run = make_run(pool=pool, envs=lambda pool: [make_env(pool, algorithm=Teacherless(GRPOConfig(), pool))], max_steps=1)
    await run.play()
    failed = [r for r in run.monitors.rollouts[1] if r.failure]
    assert {(r.failure.boundary, r.failure.type) for r in failed} == {(Boundary.ALGORITHM, "ConnectionError")}
    # A group that gave nothing is replaced, one that lost a member is not.
    assert run.bucket_total("errored") == len(failed) == (2 if hook == "score_rollout" else 4)
    assert run.bucket_total("trained") == (6 if hook == "score_rollout" else 8)


async def test_a_scoring_hook_that_hangs_is_cut_off():
    class Stuck(GRPO):
        async def score_rollout(self, rollout):
            if rollout.member == 0:
                await asyncio.sleep(60)

    pool = ScriptedPool()
    env = make_env(pool, algorithm=Stuck(GRPOConfig(), pool), rollout_deadline_s=0.2)
    run = make_run(pool=pool, envs=lambda pool: [env], max_steps=1)
    await run.play()
    failed = [r for r in run.monitors.rollouts[1] if r.failure]
    assert [r.member for r in failed] == [0, 0]
    assert "took more than 0.2 s" in failed[0].failure.message


async def test_a_hook_whose_request_was_cancelled_elsewhere_does_not_strand_the_group():
    class Cancelled(GRPO):
        async def score_rollout(self, rollout):
            if rollout.member == 2:
                raise asyncio.CancelledError

    pool = ScriptedPool()
    env = make_env(pool, algorithm=Cancelled(GRPOConfig(), pool))
    run = make_run(pool=pool, envs=lambda pool: [env], max_steps=1)
    await asyncio.wait_for(run.play(), 10)
    assert [(r.member, r.failure.type) for r in run.monitors.rollouts[1] if r.failure] == [(2, "CancelledError")] * 2


async def test_a_rollout_that_ignores_its_cancellation_is_not_scored_after_its_group_was_dropped():
    scored: list[int] = []

    class Stubborn(ToyEnv):
        async def play(self, spec, session):
            outcome = await super().play(spec, session)
            if rollout_of(session).draw_index == 0 and rollout_of(session).member == 0:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            return outcome

    class Watching(GRPO):
        async def score_group(self, rollouts):
            scored.append(rollouts[0].draw_index)
            await super().score_group(rollouts)

    pool = ScriptedPool()
    env = make_env(pool, Stubborn(), algorithm=Watching(GRPOConfig(), pool), rollout_deadline_s=100.0)
    run = make_run(pool=pool, envs=lambda pool: [env], max_steps=4, async_level=1, max_staleness_steps=1, step_s=0.01)
    await asyncio.wait_for(run.play(), 10)
    assert {r.bucket for rollouts in run.monitors.rollouts.values() for r in rollouts if r.draw_index == 0} == {"stale"}
    assert 0 not in scored


async def test_one_slow_teacher_does_not_stop_the_other_rollouts():
    release = asyncio.Event()
    scored: list[int] = []

    class SlowTeacher(GRPO):
        async def score_rollout(self, rollout):
            if rollout.draw_index == 0 and rollout.member == 0:
                await release.wait()
            scored.append(rollout.member)
            if len(scored) == 7:
                release.set()

    pool = ScriptedPool()
    run = make_run(pool=pool, envs=lambda pool: [make_env(pool, algorithm=SlowTeacher(GRPOConfig(), pool))], max_steps=1)
    await asyncio.wait_for(run.play(), 10)
    assert len(scored) == 8


async def test_equal_rewards_everywhere_end_the_run_with_advice():
    environment = ToyEnv(reward=lambda text: 0.0)
    run = make_run(envs=lambda pool: [make_env(pool, environment)], post_batch_filters=[ZERO], max_empty_batches=3)
    with pytest.raises(
        RunFailedError, match=r"3 batches in a row gave nothing.*filtered/zero_advantage 24; mean reward 0\."
    ):
        await run.play()
    assert run.batches == [] and run.monitors.steps == []


async def test_filters_that_drop_everything_before_the_batch_end_the_run_too():
    environment = ToyEnv(reward=lambda text: 0.0)
    run = make_run(envs=lambda pool: [make_env(pool, environment)], pre_batch_filters=[ZERO], max_empty_batches=3)
    with pytest.raises(RunFailedError, match="3 batches in a row gave nothing"):
        await run.play()
    assert len(run.pool.endpoint.requests) <= 4 * (6 + 2)


async def test_an_empty_batch_is_replaced_within_its_step():
    num_played: list[int] = []

    def dull_at_first(text: str) -> float:
        num_played.append(1)
        return 0.0 if len(num_played) <= 8 else 2.0 ** len(num_played)

    run = make_run(
        envs=lambda pool: [make_env(pool, ToyEnv(reward=dull_at_first))], post_batch_filters=[ZERO], max_steps=2
    )
    await run.play()
    assert [batch.step for batch in run.batches] == [1, 2]
    assert len([r for r in run.monitors.rollouts[1] if r.bucket == "filtered/zero_advantage"]) == 8
    assert run.monitors.steps[0][1]["ledger/dispatched"] == 16


async def test_overlong_rollouts_are_filed_by_what_the_packer_dropped():
    def lengthy(request, version):
        return [70] * (30 if request.sampling.seed % 2 else 3)

    run = make_run(
        pool=ScriptedPool(lengthy), max_steps=3, row_length=24, envs=lambda pool: [_with_window(pool, max_tokens=32)]
    )
    await run.play()
    dropped = [r for rollouts in run.monitors.rollouts.values() for r in rollouts if r.bucket == "overlong_dropped"]
    assert dropped and all(len(r.samples[0]) > 24 for r in dropped)
    assert sum(m["pack/overlong_samples"] for _, m in run.monitors.steps) == len(dropped)
    assert run.bucket_total("overlong_dropped") == len(dropped)
    assert run.bucket_total("truncated") == 24


async def test_a_batch_of_overlong_rollouts_only_is_empty():
    run = make_run(
        pool=ScriptedPool(lambda request, version: [70] * 30),
        row_length=24,
        envs=lambda pool: [_with_window(pool, max_tokens=32)],
        max_empty_batches=2,
    )
    with pytest.raises(RunFailedError, match="overlong_dropped 16"):
        await run.play()


def _with_window(pool, *, max_tokens: int):
    env = make_env(pool)
    source = dataclasses.replace(env.sampler.source, sampling=SamplingConfig(max_tokens=max_tokens))
    sampler = dataclasses.replace(env.sampler, source=source)
    return dataclasses.replace(env, sampler=sampler)


async def test_a_step_counted_in_tokens_takes_groups_until_it_has_enough():
    run = make_run(max_steps=4, batch_size=None, token_batch_size=300)
    await run.play()
    for batch, (_, metrics) in zip(run.batches, run.monitors.steps, strict=True):
        assert batch.num_tokens >= 300
        assert metrics["ledger/pending"] == 0
    sizes = [batch.num_tokens for batch in run.batches]
    assert max(sizes) < 300 + 2 * 4 * 20


def draw_index(request) -> int:
    return int(request.request_id.split("/")[1])


def longer_later(request, version) -> list[int]:
    """Reply briefly in the first group and at length in the others."""
    return [70] * (1 if draw_index(request) == 0 else 30)


async def test_a_synchronous_step_takes_every_group_that_it_drew():
    """After a first group of short replies two more are drawn, of which one would have been enough."""
    run = make_run(
        pool=ScriptedPool(longer_later),
        envs=lambda pool: [_with_window(pool, max_tokens=32)],
        max_steps=2,
        batch_size=None,
        token_batch_size=150,
    )
    await run.play()
    assert {(r.draw_index, str(r.bucket)) for r in run.monitors.rollouts[1]} == {(n, "trained") for n in range(3)}
    assert [metrics["ledger/pending"] for _, metrics in run.monitors.steps] == [0, 0]


async def test_what_the_last_step_has_no_use_for_is_cancelled_and_written_down_with_it():
    """After a first group of short replies, more groups are drawn than the step turns out to need."""
    run = make_run(
        pool=ScriptedPool(longer_later, latency=lambda request: 0.1 * draw_index(request)),
        envs=lambda pool: [_with_window(pool, max_tokens=32)],
        max_steps=1,
        async_level=1,
        batch_size=None,
        token_batch_size=200,
    )
    await run.play()
    buckets = {r.draw_index: str(r.bucket) for r in run.monitors.rollouts[1]}
    assert (buckets[0], buckets[1]) == ("trained", "trained")
    assert {bucket for draw, bucket in buckets.items() if draw > 1} == {"cancelled"}
    assert set(run.monitors.rollouts) == {1}
    assert run.bucket_total("pending") == 0


async def test_asynchronous_generation_goes_on_while_the_trainer_works():
    run = make_run(max_steps=4, async_level=1, step_s=0.05)
    await run.play()
    assert [batch.step for batch in run.batches] == [1, 2, 3, 4]
    second = run.monitors.rollouts[2]
    assert {r.oldest_version for r in second} == {0}  # played while step 1 trained
    assert run.monitors.steps[1][1]["policy/staleness_steps/max"] == 1


async def test_level_one_never_ships_further_ahead_than_one_step():
    run = make_run(max_steps=5, async_level=1, step_s=0.02)
    leads: list[int] = []
    send = run.channel.send

    async def watching_send(batch, deadline_s):
        leads.append(batch.step - 1 - run.pool.version)
        await send(batch, deadline_s)

    run.channel.send = watching_send
    await run.play()
    assert max(leads) == 1


async def test_a_bound_of_zero_on_staleness_makes_the_run_synchronous():
    run = make_run(max_steps=3, async_level=2, step_s=0.01, max_staleness_steps=0)
    await run.play()
    assert [m["policy/staleness_steps/max"] for _, m in run.monitors.steps] == [0, 0, 0]
    assert run.bucket_total("stale") == 0
    assert min(m["time/wait_for_policy_s"] for _, m in run.monitors.steps[1:]) > 0.009


async def test_the_trainers_failure_is_raised_as_it_is():
    run = make_run(max_steps=3, failure_at=2)
    with pytest.raises(RuntimeError, match="the trainer broke at step 2") as caught:
        await run.play()
    assert caught.value is run.trainer.failure
    assert [step for step, _ in run.monitors.steps] == [1]


async def test_a_trainer_that_stops_answering_is_named_when_the_deadline_passes():
    stuck = threading.Event()
    run = make_run(max_steps=3, wait_deadline_s=0.3, on_applied=lambda step: step == 2 and stuck.wait(1))
    with pytest.raises(DeadlineError, match=r"(?s)next step report.*step \d of 3.*last report of step 1"):
        try:
            await run.play()
        finally:
            stuck.set()


async def test_a_policy_that_stops_answering_is_named_when_the_deadline_passes():
    run = make_run(max_steps=1, wait_deadline_s=0.3)
    run.pool.endpoint._running.clear()
    with pytest.raises(DeadlineError, match=r"nothing happened for 0\.3 s.*groups in flight: toy 2 .*policy version 0"):
        await run.play()


async def test_a_broken_task_sampler_ends_the_run_at_once():
    run = make_run()

    def broken(*args):
        raise KeyError("no such task")

    run.envs[0].tasks.update = broken
    with pytest.raises(RunFailedError, match=r"when it was told of a group: KeyError: 'no such task' \(test_orchestrator.py") as caught:
        await run.play()
    assert component_of_error(caught.value) == "task sampler of environment 'toy'"


async def test_a_stop_request_cancels_what_plays_and_returns():
    async def hang(spec):
        if len(run.batches) == 2:
            asyncio.get_running_loop().call_later(0.02, run.orchestrator.request_stop)
            await asyncio.sleep(60)

    run = make_run(envs=lambda pool: [make_env(pool, ToyEnv(before_play=hang), rollout_deadline_s=100.0)], max_steps=50)
    await asyncio.wait_for(run.play(), 10)
    assert [step for step, _ in run.monitors.steps] == [1, 2]
    assert [r.bucket for r in run.monitors.rollouts[3]] == ["cancelled"] * 8
    assert run.orchestrator.snapshot(2) == run.orchestrator.snapshot()


async def test_a_stop_request_lets_the_step_in_training_be_reported():
    loop = asyncio.get_running_loop()

    def stop_at_two(step: int) -> None:
        if step == 2:
            loop.call_soon_threadsafe(run.orchestrator.request_stop)

    run = make_run(max_steps=50, async_level=1, step_s=0.02, on_applied=stop_at_two)
    await asyncio.wait_for(run.play(), 10)
    assert [step for step, _ in run.monitors.steps] == [batch.step for batch in run.batches]
    assert 2 <= len(run.batches) <= 4
    assert run.pool.version == len(run.batches)


async def test_the_policy_is_measured_before_the_first_draw_every_n_steps_and_at_the_end():
    measured: list[tuple[int, int, int]] = []

    async def evaluate(step: int, version: int) -> None:
        assert run.pool._free.locked()
        measured.append((step, version, len(run.pool.endpoint.requests)))

    run = make_run(max_steps=5, evaluate=evaluate, eval={"every_n_steps": 2})
    await run.play()
    assert [(step, version) for step, version, _ in measured] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert measured[0][2] == 0


async def test_a_slow_measurement_is_no_stall_and_holds_its_version():
    async def evaluate(step: int, version: int) -> None:
        before = run.pool.version
        await asyncio.sleep(0.5)
        assert run.pool.version == before == version

    run = make_run(max_steps=2, wait_deadline_s=0.3, evaluate=evaluate, eval={"every_n_steps": 1})
    await run.play()
    assert [step for step, _ in run.monitors.steps] == [1, 2]


async def test_a_stop_request_ends_a_measurement():
    async def evaluate(step: int, version: int) -> None:
        await asyncio.sleep(60)

    run = make_run(evaluate=evaluate)
    asyncio.get_running_loop().call_later(0.05, run.orchestrator.request_stop)
    await asyncio.wait_for(run.play(), 5)
    assert run.batches == []


async def test_a_failing_measurement_ends_the_run():
    async def evaluate(step: int, version: int) -> None:
        raise ZeroDivisionError("no tasks")

    with pytest.raises(ZeroDivisionError, match="no tasks"):
        await make_run(evaluate=evaluate).play()


async def test_measuring_changes_nothing_in_training():
    async def evaluate(step: int, version: int) -> None:
        await asyncio.sleep(0.01)

    runs = [make_run(max_steps=3, evaluate=e, eval={"every_n_steps": 1}) for e in (None, evaluate)]
    for run in runs:
        await run.play()
    for left, right in zip(runs[0].batches, runs[1].batches, strict=True):
        np.testing.assert_array_equal(left.micro_batches[0].token_ids, right.micro_batches[0].token_ids)


async def test_a_policy_at_another_version_than_the_run_is_refused():
    with pytest.raises(RunFailedError, match="step 1 starts from version 0, but the policy is at 3"):
        await make_run(start_version=3).play()


async def test_a_run_that_fails_before_it_begins_lets_the_trainer_go():
    class Unready(GRPO):
        async def setup(self):
            raise ConnectionError("no teacher")

    pool = ScriptedPool()
    run = make_run(pool=pool, envs=lambda pool: [make_env(pool, algorithm=Unready(GRPOConfig(), pool))])
    run.trainer.start()
    with pytest.raises(ConnectionError, match="no teacher"):
        await run.orchestrator.run()
    await asyncio.to_thread(run.trainer.join)
    assert run.trainer.failure is None


async def test_pools_that_an_algorithm_connected_are_closed_and_the_policy_is_not():
    class Closable(ScriptedPool):
        is_closed = False

        async def close(self):
            self.is_closed = True

    teacher, policy = Closable(), Closable()

    class Taught(GRPO):
        async def setup(self):
            self.connected_pools.append(teacher)

    run = make_run(pool=policy, envs=lambda pool: [make_env(pool, algorithm=Taught(GRPOConfig(), pool))], max_steps=1)
    await run.play()
    assert (teacher.is_closed, policy.is_closed) == (True, False)


async def test_two_environments_share_a_step_without_mixing_groups():
    run = make_run(
        envs=lambda pool: [make_env(pool, ToyEnv(name, num_tasks=3), ratio=r) for name, r in (("a", 1.0), ("b", 2.0))],
        max_steps=6,
        batch_size=16,
    )
    await run.play()
    names = [r.env_name for rollouts in run.monitors.rollouts.values() for r in rollouts if r.member == 0]
    assert len(names) == 24 and 10 < names.count("b") < 22
    for rollouts in run.monitors.rollouts.values():
        for rollout in rollouts:
            assert rollout.group_id == f"{rollout.env_name}/{rollout.draw_index}"
            assert rollout.task.id.startswith(rollout.env_name)
    assert {name for _, metrics in run.monitors.steps for name in metrics} >= {
        "rollout/reward/mean/a",
        "rollout/reward/mean/b",
    }
