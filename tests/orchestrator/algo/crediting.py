"""Plays groups to an algorithm the way a run does: rollouts arrive at the real sink, the last one credits the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.algo import Algorithm, AlgorithmContext, build_algorithm
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sink import Sink
from jaxrl.types import Boundary, Failure, Group, Rollout
from tests.builders import make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env

ERRORED, UNSCORED = "errored", None
"""In a list of rewards: a rollout that failed, and one that the environment could not score."""
FAILURE = Failure(Boundary.ENV, "ValueError", "broke")


def make_algorithm(config: Any, **context: Any) -> Algorithm:
    """Return the algorithm that a config describes, beside a scripted policy."""
    return build_algorithm(config, ScriptedPool(), AlgorithmContext(env_name="toy", **context))


def make_rollouts(rewards: Sequence[float | str | None], num_tokens: Sequence[int] | None = None, **settings: Any) -> list[Rollout]:
    """Return a group's rollouts as they were played, of `num_tokens` sampled tokens each; further keywords go to `make_rollout`."""
    rollouts = []
    for member, reward in enumerate(rewards):
        is_errored = reward == ERRORED
        turns = [([1, 2], range(3, 3 + (num_tokens[member] if num_tokens else 3)))]
        rollout = make_rollout(None if is_errored else reward, member=member, **({"turns": turns} | settings))
        rollout.failure = FAILURE if is_errored else None
        rollouts.append(rollout)
    return rollouts


async def credit(algorithm: Algorithm, rollouts: Sequence[Rollout]) -> list[float | None]:
    """Let the rollouts arrive, the last member first, and return what each sampled token of each was credited with."""
    sink = Sink(Ledger(), StepTally(), is_ordered=False, pre_batch_filters=[], max_consecutive_failures=99, on_change=lambda: None)
    env = make_env(ScriptedPool(), ToyEnv("toy"), algorithm=algorithm)
    first = rollouts[0]
    group = Group(first.group_id, first.task, first.draw_index, size=len(rollouts), version=0)
    opened = OpenGroup(0, Draw("toy", first.task.spec, 0), env, group, list(rollouts), opened_at_s=0.0)
    for rollout in reversed(rollouts):
        await sink.add(opened, rollout)
    assert list(sink.finished) == [opened]
    return [credit_of(rollout) for rollout in rollouts]


def credit_of(rollout: Rollout) -> float | None:
    """Return the one number on every sampled token of a rollout, having seen 0 on the others; None if none was assigned."""
    streams = [sample.advantages for sample in rollout.samples]
    if all(stream is None for stream in streams):
        return None
    on_mask = np.concatenate([sample.advantages[sample.loss_mask] for sample in rollout.samples])
    assert len(set(on_mask.tolist())) == 1
    assert not any(sample.advantages[~sample.loss_mask].any() for sample in rollout.samples)
    return float(on_mask[0])
