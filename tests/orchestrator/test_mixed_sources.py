"""One run whose environments have their replies from the policy, from demonstrations and from a frozen model."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jaxrl.config.algorithm import GRPOConfig, SFTConfig
from jaxrl.config.env import SamplingConfig
from jaxrl.config.filters import ZeroAdvantageFilterConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.orchestrator.algo import build_algorithm
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.orchestrator.sources import DemonstrationSource, FrozenSource
from jaxrl.transport.codec import encode
from jaxrl.types import Bucket, Rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.inference.wire_server import MODEL, FakeModel, WireServer
from tests.orchestrator.wiring import ROW_LENGTH, Run, make_env, make_run, renderer

SFT = SFTConfig(sampling={"source": "demonstrations"})  # type: ignore[arg-type]
ZERO = ZeroAdvantageFilterConfig()


def envs(pool: ScriptedPool, url: str, missing: Sequence[str] = ()) -> list[TrainEnv]:
    """Return three environments; `missing` are the tasks without a demonstration."""
    shown = ToyEnv("shown", num_tasks=3, demonstration=lambda spec: None if spec["id"] in missing else f"Answer {spec['id']}")
    model = FrozenModelConfig(name=MODEL, base_url=[url])
    source = FrozenSource(
        model,
        renderer(),
        SamplingConfig(max_tokens=4, temperature=0.0, top_k=5),
        run_seed=0,
        window=ROW_LENGTH,
    )
    return [
        make_env(pool, ToyEnv("played", num_tasks=5), algorithm=build_algorithm(GRPOConfig(), pool)),
        make_env(
            pool,
            shown,
            algorithm=build_algorithm(SFT, pool),
            source=DemonstrationSource(renderer(), shown.demonstration, ROW_LENGTH),
        ),
        make_env(pool, ToyEnv("taught", num_tasks=4), algorithm=build_algorithm(SFT, pool), source=source),
    ]


@asynccontextmanager
async def wired(latency_seed: int = 0, *, start: int = 0, missing: Sequence[str] = (), **settings: Any) -> AsyncIterator[Run]:
    """Give a run of the three environments with a server of its own, whose requests take random times."""
    generator = random.Random(latency_seed)
    model = FakeModel(tokenizer=renderer())
    async with WireServer(model).running() as server:
        pool = ScriptedPool(version=start, latency=lambda request: generator.random() * 0.003)
        yield make_run(pool=pool, envs=lambda pool: envs(pool, server.base_url, missing), batch_size=16, **settings)


def written(run: Run) -> list[Rollout]:
    return [rollout for _, rollouts in sorted(run.monitors.rollouts.items()) for rollout in rollouts]


def check_ledger(run: Run) -> None:
    for _, row in run.monitors.steps:
        buckets = {k: v for k, v in row.items() if k.startswith("ledger/") and k not in ("ledger/dispatched", "ledger/truncated")}
        assert sum(buckets.values()) == row["ledger/dispatched"], row


def check_tokens(run: Run) -> None:
    """Check what every trained rollout carries, by who wrote it."""
    for rollout in (rollout for rollout in written(run) if rollout.bucket == Bucket.TRAINED):
        (reply,) = [node for node in rollout.nodes if node.sampled]
        (sample,) = rollout.samples
        is_live = rollout.env_name == "played"
        assert reply.source == {"played": "policy", "shown": "demonstrations", "taught": "frozen"}[rollout.env_name]
        assert (rollout.oldest_version is not None) == (reply.logprobs is not None) == bool(sample.inference_logprobs.any()) == is_live
        assert (sample.ce_weights is not None) == (not is_live)
        if not is_live:
            assert not sample.rl_weights.any() and (sample.ce_weights[sample.loss_mask] == 1).all()


async def test_demonstrations_and_a_frozen_model_train_beside_the_policy_and_the_ledger_balances() -> None:
    async with wired(max_steps=4, pre_batch_filters=[ZERO], post_batch_filters=[ZERO], missing=["shown-1"]) as run:
        await run.play()
    check_ledger(run)
    check_tokens(run)
    trained = Counter(r.env_name for r in written(run) if r.bucket == Bucket.TRAINED)
    assert min(trained[name] for name in ("played", "shown", "taught")) > 0
    errored = [r for r in written(run) if r.bucket == Bucket.ERRORED]
    assert errored and {r.task.id for r in errored} == {"shown-1"}
    assert all("env 'shown', task 'shown-1': the environment has no demonstration" in r.failure.message for r in errored if r.failure)
    shown = [r for r in written(run) if r.env_name in ("shown", "taught") and r.failure is None]
    assert {str(r.bucket) for r in shown} == {"trained"}, "equal members have no advantage, but their tokens are trained on"
    for _, row in run.monitors.steps:
        assert row.get("policy/staleness_steps/max", 0) == 0
        assert row["throughput/generated_tokens_per_s"] >= 0


async def test_n_plus_n_synchronous_steps_of_mixed_sources_equal_two_n() -> None:
    async with wired(1, max_steps=6) as whole:
        await whole.play()
    taken: dict[int, bytes] = {}

    def take(step: int) -> None:
        taken[step] = first.orchestrator.snapshot(step)

    async with wired(2, max_steps=6, failure_at=4, on_applied=take) as first:
        with pytest.raises(RuntimeError, match="broke at step 4"):
            await first.play()
    async with wired(3, start=3, max_steps=6) as second:
        second.orchestrator.restore(taken[3])
        await second.play()
    assert [encode(batch) for batch in first.batches + second.batches] == [encode(batch) for batch in whole.batches]
    assert len({r.env_name for r in written(whole)}) == 3


async def test_in_asynchronous_mode_frozen_rollouts_never_go_stale_while_the_policys_do() -> None:
    async with wired(4, max_steps=6, async_level=1, max_staleness_steps=1, step_s=0.003, max_inflight_groups=9) as run:
        for env in run.envs[:2]:
            firsts: list[str] = []

            async def hold_up_the_first(spec: Any, firsts: list[str] = firsts) -> None:
                firsts.append(spec["id"])
                if len(firsts) <= 4:  # the members of the first group
                    while run.pool.version < 4 and not run.orchestrator._is_stopping:
                        await asyncio.sleep(0.001)

            env.sampler.environment.before_play = hold_up_the_first
        await run.play()
    check_ledger(run)
    check_tokens(run)
    stale = [r for r in written(run) if r.bucket == Bucket.STALE]
    assert stale and {r.env_name for r in stale} == {"played"}
    held_up = [r for r in written(run) if r.env_name == "shown" and r.draw_index == 0]
    assert {r.bucket for r in held_up} == {Bucket.TRAINED}
    values = [row["policy/staleness_steps/max"] for _, row in run.monitors.steps if "policy/staleness_steps/max" in row]
    assert values and np.max(values) <= 1
