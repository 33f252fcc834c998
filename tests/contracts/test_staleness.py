"""What staleness means, in numbered sentences; a change that breaks one of them changes what is trained on.

1. Step k trains v_{k-1}: a token sampled from v_{k-1} has staleness 0, and staleness counts versions, not seconds.
2. No step ever trains on a token whose staleness exceeds `max_staleness_steps`, for any interleaving of players and
trainer. 3. A group is never dispatched more than `async_level` steps ahead of the policy that plays it. 4. Too old is
the whole group, by its oldest token; it is `stale`, it is replaced, and the task sampler does not learn from it. 5. A
version is announced only once it is served: no token is labelled with a version that did not sample it. 6. A source
that is not the policy has no version and never goes stale. 7. Whatever happens, every dispatched rollout is in exactly
one bucket and the buckets add up, at every step.
"""

import asyncio
import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.orchestrator.algo import Algorithm
from jaxrl.orchestrator.sources import DemonstrationSource
from jaxrl.types import Bucket, staleness_steps
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import ROW_LENGTH, make_env, make_run, renderer, rollout_of


def test_1_a_token_of_the_version_that_the_step_trains_has_staleness_zero():
    assert [staleness_steps(step=5, oldest_version=v) for v in (4, 3, 0)] == [0, 1, 4]


def _random_run(seed: int, **settings):
    """Return a run whose players and trainer take random times, some players very long ones."""
    generator = random.Random(seed)

    def latency(request) -> float:
        return generator.random() ** 6 * 0.04

    pool = ScriptedPool(latency=latency)
    run = make_run(pool=pool, envs=lambda pool: [make_env(pool, ToyEnv(num_tasks=16))], **settings)
    dispatched: list[tuple[int, int]] = []
    opening = run.orchestrator._dispatcher.open

    def watching_open(version, tasks):
        dispatched.append((run.orchestrator._step, version))
        return opening(version, tasks)

    run.orchestrator._dispatcher.open = watching_open
    return run, dispatched


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    async_level=st.integers(1, 3),
    max_staleness_steps=st.integers(1, 3),
    step_ms=st.integers(0, 6),
    max_inflight_groups=st.integers(2, 8),
)
def test_2_3_7_hold_for_any_interleaving(seed, async_level, max_staleness_steps, step_ms, max_inflight_groups):
    async def check():
        run, dispatched = _random_run(
            seed,
            max_steps=20,
            async_level=async_level,
            step_s=step_ms / 1000,
            max_staleness_steps=max_staleness_steps,
            max_inflight_groups=max_inflight_groups,
        )
        await run.play()
        assert [batch.step for batch in run.batches] == list(range(1, 21))
        for step, rollouts in run.monitors.rollouts.items():
            trained = [r for r in rollouts if r.bucket == Bucket.TRAINED]
            assert trained
            assert max(staleness_steps(step, r.oldest_version) for r in trained) <= max_staleness_steps
        assert max(step - 1 - version for step, version in dispatched) <= min(async_level, max_staleness_steps)
        for _, metrics in run.monitors.steps:
            ledger = {k: v for k, v in metrics.items() if k.startswith("ledger/")}
            total, _ = ledger.pop("ledger/dispatched"), ledger.pop("ledger/truncated")
            assert sum(ledger.values()) == total
        assert run.bucket_total("pending") == 0
        assert set(run.monitors.rollouts) == set(range(1, 21))
        written = [r for rollouts in run.monitors.rollouts.values() for r in rollouts]
        assert len(written) == run.bucket_total("dispatched") == 4 * len(dispatched)

    asyncio.run(check())


async def test_4_a_group_that_is_too_old_is_dropped_whole_and_replaced():
    """One member of the first group plays until its version is out of bounds; the others finished long ago."""
    updates: list[str] = []
    release = asyncio.Event()

    class Straggling(ToyEnv):
        async def play(self, spec, session):
            rollout = rollout_of(session)
            outcome = await super().play(spec, session)
            if rollout.draw_index == 0 and rollout.member == 1:
                await release.wait()
            return outcome

    run = make_run(
        envs=lambda pool: [make_env(pool, Straggling())], max_steps=4, async_level=1, max_staleness_steps=1, step_s=0.01
    )
    update = run.envs[0].tasks.update
    run.envs[0].tasks.update = lambda spec, rewards, costs: (updates.append(spec["id"]), update(spec, rewards, costs))
    await asyncio.wait_for(run.play(), 10)
    written = [r for rollouts in run.monitors.rollouts.values() for r in rollouts]
    first = [r for r in written if r.draw_index == 0]
    assert [r.bucket for r in first] == ["stale"] * 4
    assert {r.reward is None for r in first} == {True, False}
    assert first[0].task.id not in updates[:3]
    assert [batch.num_samples for batch in run.batches] == [8] * 4
    assert {r.draw_index for r in written if r.bucket == "stale"} == {0}


async def test_4_a_queued_group_goes_stale_when_its_step_comes_too_late():
    """A group that straddles two versions counts by the older one."""

    async def wait_for_version_two(spec):
        while run.pool.version < 2 and spec["id"] == straggler[0]:
            await asyncio.sleep(0.001)

    straggler: list[str] = []

    async def first_is_slow(spec):
        straggler.append(spec["id"])
        await wait_for_version_two(spec)

    environment = ToyEnv(before_play=first_is_slow, num_turns=1)
    run = make_run(
        envs=lambda pool: [make_env(pool, environment)], max_steps=5, async_level=1, max_staleness_steps=4, step_s=0.005
    )
    await asyncio.wait_for(run.play(), 10)
    late = [r for rollouts in run.monitors.rollouts.values() for r in rollouts if r.draw_index == 0]
    assert {r.bucket for r in late} == {"trained"}
    assert min(r.oldest_version for r in late) >= 2  # opened at v0, but sampled from v2: only tokens count at the end


async def test_5_no_token_carries_a_version_that_had_not_been_loaded_when_it_was_sampled():
    loads: list[int] = []

    class Slow(ScriptedPool):
        async def update(self, version):
            await asyncio.sleep(0.01)
            await super().update(version)
            loads.append(version)

    run = make_run(pool=Slow(latency=lambda request: 0.002), max_steps=5, async_level=1, step_s=0.002)
    await run.play()
    for rollouts in run.monitors.rollouts.values():
        for rollout in rollouts:
            versions = [v for node in rollout.nodes if node.versions is not None for v in node.versions.tolist()]
            assert versions == sorted(versions)
            assert set(versions) <= {0, *loads}


@pytest.mark.parametrize("bound", [1, 2])
async def test_6_a_frozen_source_never_goes_stale(bound):
    first: list[str] = []

    async def hold_up_the_first_draw(spec):
        first.append(spec["id"])
        while spec["id"] == first[0] and run.pool.version < 4:
            await asyncio.sleep(0.001)

    class Distil(Algorithm):
        action_loss_type: ClassVar = "ce"

    def envs(pool):
        environment = ToyEnv(num_tasks=16, before_play=hold_up_the_first_draw, demonstration=lambda spec: spec["id"])
        source = DemonstrationSource(renderer(), environment.demonstration, window=ROW_LENGTH)
        return [make_env(pool, environment, algorithm=Distil(None, pool), source=source)]

    run = make_run(
        envs=envs, max_steps=6, async_level=1, max_staleness_steps=bound, step_s=0.003, max_inflight_groups=4
    )
    await asyncio.wait_for(run.play(), 10)
    written = [r for rollouts in run.monitors.rollouts.values() for r in rollouts]
    assert {r.bucket for r in written if r.draw_index == 0} == {"trained"}
    assert run.bucket_total("stale") == 0
