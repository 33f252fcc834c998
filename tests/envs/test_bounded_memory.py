"""What many conversations that are played at the same time take, and that nothing of them stays but what was said."""

import asyncio
import collections
import gc
import tracemalloc
import weakref

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.chat import ChatEnvironment, Episode
from jaxrl.envs.play import play_rollout
from jaxrl.envs.session import PolicySession
from jaxrl.inference.rendering.turns import RenderState
from jaxrl.types import Rollout
from tests.envs.policies import IM_END, RENDERER, make_rollout
from tests.fakes import ScriptedPool

NUM_TURNS = 5
NUM_REPLY_TOKENS = 100


class Talk(ChatEnvironment):
    """Asks again and again."""

    async def reset(self, episode: Episode) -> str:
        return "Say something about the weather today."

    async def reply(self, episode: Episode) -> str:
        return "And about that of the day after tomorrow?"

    async def score(self, episode: Episode) -> float:
        return 1.0


class Played:
    """Rollouts that are all alive at the same time: the policy answers none before every one has asked."""

    def __init__(self, num_rollouts: int) -> None:
        self.env = Talk("talk", [{"id": "t"}], budget=BudgetConfig(max_turns=NUM_TURNS))
        self.pool = ScriptedPool(lambda request, _: [65 + i % 26 for i in range(NUM_REPLY_TOKENS - 1)] + [IM_END])
        # The requests of a run are not kept either, and hold whole prompts.
        self.pool.endpoint.requests = collections.deque(maxlen=0)  # type: ignore[assignment]
        self.rollouts = [make_rollout(member=member) for member in range(num_rollouts)]
        self.sessions: list[weakref.ref[PolicySession]] = []
        self.num_states: list[int] = []

    async def play(self, *, counts_states: bool = False) -> None:
        endpoint, num = self.pool.endpoint, len(self.rollouts)
        playing = [asyncio.create_task(self._play(rollout)) for rollout in self.rollouts]
        for _ in range(NUM_TURNS if counts_states else 1):
            await endpoint.pause()
            async with asyncio.timeout(300.0):
                while endpoint.num_running < num:
                    await asyncio.sleep(0.01)
            if counts_states:
                self.num_states.append(num_alive_states())
            await endpoint.resume()
            async with asyncio.timeout(300.0):
                while endpoint.num_running == num:
                    await asyncio.sleep(0)
        await asyncio.gather(*playing)

    async def _play(self, rollout: Rollout) -> None:
        session = PolicySession(self.pool, RENDERER, rollout, SamplingConfig(), run_seed=0, seed_scope="talk", window=4096)
        self.sessions.append(weakref.ref(session))
        await play_rollout(self.env, rollout, session, 300.0)


def num_alive_states() -> int:
    gc.collect()
    return sum(isinstance(thing, RenderState) for thing in gc.get_objects())


def test_a_live_session_holds_the_tokens_of_its_last_turn_and_of_none_before() -> None:
    before = num_alive_states()
    played = Played(4)
    asyncio.run(played.play(counts_states=True))
    assert [num - before for num in played.num_states] == [0, 4, 4, 4, 4], "whole conversations that are held while a reply is awaited"
    assert num_alive_states() == before


@pytest.mark.parametrize("num_rollouts", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_conversations_side_by_side_take_a_bounded_memory_each_and_leave_nothing_behind(num_rollouts: int) -> None:
    asyncio.run(Played(2).play())  # what is made once, such as compiled templates
    gc.collect()
    tracemalloc.start()
    try:
        played = Played(num_rollouts)
        asyncio.run(played.play())
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        assert [session() for session in played.sessions if session() is not None] == []
        assert all(rollout.failure is None and rollout.num_turns == NUM_TURNS for rollout in played.rollouts)
        del played
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Measured: 42 kB while they play, 15 kB of them nodes: 4 bytes for an id, a logprob and a version each, texts and objects.
    assert peak / num_rollouts < 80_000
    assert kept / num_rollouts < 30_000
    assert left / num_rollouts < 2_000
