"""A whole orchestrator on fakes, wired as a run wires it: scripted policy, toy worlds, the real packer, channel and
task samplers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.batching import pack
from jaxrl.config.algorithm import GRPOConfig
from jaxrl.config.env import ReverseTextEnvConfig, SamplingConfig
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.orchestrator import OrchestratorConfig, TrainSectionConfig
from jaxrl.envs.session import PolicySession
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import GRPO, Algorithm
from jaxrl.orchestrator.orchestrator import Orchestrator
from jaxrl.orchestrator.sampler import Sampler, TrainEnv
from jaxrl.orchestrator.sources import PolicySource, Source
from jaxrl.tasks import TaskSampler, UniformSampler
from jaxrl.transport.memory import InProcessChannel
from jaxrl.types import Rollout
from tests.fakes import FakeTrainer, RecordingMonitors, ScriptedPool, ToyEnv

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer"
ROW_LENGTH = 64


@functools.cache
def renderer() -> Renderer:
    """Return the golden tokenizer's renderer, loaded once."""
    return Renderer.from_pretrained(TOKENIZER)


def make_config(**settings: Any) -> OrchestratorConfig:
    """Return a small orchestrator config: groups of 4, two of them per step."""
    defaults: dict[str, Any] = {"group_size": 4, "batch_size": 8, "wait_deadline_s": 20.0, "post_batch_filters": []}
    return OrchestratorConfig(
        model=PolicyModelConfig(name="scripted"),
        train=TrainSectionConfig(env=[ReverseTextEnvConfig(name="toy")]),
        **(defaults | settings),
    )


def make_env(
    pool: ScriptedPool,
    environment: ToyEnv | None = None,
    *,
    ratio: float = 1.0,
    algorithm: Algorithm | None = None,
    rollout_deadline_s: float = 10.0,
    seed: int = 0,
    source: Source | None = None,
    tasks: TaskSampler | None = None,
    **settings: Any,
) -> TrainEnv:
    """Return one wired training environment; its source is the policy behind `pool`, and its tasks are shuffled, unless others are given.

    Further keywords go to the environment.
    """
    environment = environment or ToyEnv()
    source = source or PolicySource(
        pool, renderer(), SamplingConfig(max_tokens=8), run_seed=seed, window=ROW_LENGTH, places=asyncio.Semaphore(1000)
    )
    sampler = Sampler(environment, source, rollout_deadline_s=rollout_deadline_s)
    tasks = tasks or UniformSampler(environment.tasks(), rng_seed=seed)
    return TrainEnv(environment.name, ratio, tasks, sampler, algorithm or GRPO(GRPOConfig(), pool), **settings)


def rollout_of(session: PolicySession) -> Rollout:
    """Return the rollout behind a session; environments cannot see it, tests that break one member must."""
    return session._transcript.rollout


@dataclass
class Run:
    """A wired run."""

    orchestrator: Orchestrator
    trainer: FakeTrainer
    channel: InProcessChannel
    pool: ScriptedPool
    monitors: RecordingMonitors
    envs: list[TrainEnv]

    async def play(self) -> None:
        """Run to the end; the trainer's thread ends with it."""
        self.trainer.start()
        try:
            await self.orchestrator.run()
        finally:
            self.channel.close()
            await asyncio.to_thread(self.trainer.join)

    @property
    def batches(self) -> list[Any]:
        """What the trainer was sent."""
        return self.trainer.batches

    def bucket_total(self, bucket: str) -> float:
        """Return the last step's total of a bucket."""
        return self.monitors.steps[-1][1][f"ledger/{bucket}"]


def make_run(
    *,
    pool: ScriptedPool | None = None,
    envs: Callable[[ScriptedPool], Sequence[TrainEnv]] | None = None,
    max_steps: int = 3,
    async_level: int = 0,
    start_version: int = 0,
    step_s: float = 0.0,
    seed: int = 0,
    on_applied: Callable[[int], None] | None = None,
    failure_at: int | None = None,
    evaluate: Any = None,
    overlong: str = "drop",
    row_length: int = ROW_LENGTH,
    **settings: Any,
) -> Run:
    """Return a run that has not started; further keywords go to the config."""
    pool = pool or ScriptedPool(version=start_version)
    wired = list(envs(pool)) if envs else [make_env(pool, seed=seed)]
    channel = InProcessChannel(max(1, async_level))
    monitors = RecordingMonitors()
    orchestrator = Orchestrator(
        make_config(**settings),
        wired,
        pool=pool,
        channel=channel,
        pack=partial(pack, row_length=row_length, rows=2, shards=1, max_segments=8, overlong=overlong),
        monitors=monitors,
        max_steps=max_steps,
        seed=seed,
        async_level=async_level,
        row_length=row_length,
        overlong=overlong,
        evaluate=evaluate,
    )
    trainer = FakeTrainer(channel, step_s=step_s, on_applied=on_applied, failure_at=failure_at)
    return Run(orchestrator, trainer, channel, pool, monitors, wired)
