"""A rollout's deadline is for playing, not for waiting until there is room to play."""

import asyncio
import dataclasses

from jaxrl.types import Boundary, Rollout, Task
from tests.fakes import ScriptedPool, ToyEnv
from tests.orchestrator.wiring import make_env

TURN_S = 0.6


async def play_two(num_places: int) -> list[Rollout]:
    """Play two rollouts that need the same thing for `TURN_S` each, with a deadline of 1.5 turns."""
    one_at_a_time = asyncio.Lock()

    async def take_a_turn(spec: object) -> None:
        async with one_at_a_time:
            await asyncio.sleep(TURN_S)

    env = make_env(ScriptedPool(), ToyEnv(before_play=take_a_turn), rollout_deadline_s=1.5 * TURN_S)
    source = dataclasses.replace(env.sampler.source, places=asyncio.Semaphore(num_places))
    sampler = dataclasses.replace(env.sampler, source=source)
    spec = env.sampler.environment.tasks()[0]
    rollouts = [Rollout(Task("toy", spec["id"], spec), "toy/0", member=member, draw_index=0) for member in range(2)]
    await asyncio.gather(*(sampler.play(rollout) for rollout in rollouts))
    return rollouts


async def test_waiting_for_a_place_is_not_part_of_the_deadline() -> None:
    assert [rollout.failure for rollout in await play_two(num_places=1)] == [None, None]


async def test_what_holds_a_rollout_up_while_it_plays_is_part_of_the_deadline() -> None:
    failures = [rollout.failure for rollout in await play_two(num_places=2)]
    assert [failure.boundary for failure in failures if failure is not None] == [Boundary.TIMEOUT]
