"""`jaxrl.envs.verifiers.environment`: episodes of a stand-in world talk to the policy over HTTP, and every token is recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.gateway.server import SESSION_ID, SHARED_KEY, Gateway
from jaxrl.envs.play import play_rollout
from jaxrl.envs.verifiers.environment import VerifiersEnvironment
from jaxrl.envs.verifiers.verdicts import Verdict
from jaxrl.errors import EngineError
from jaxrl.inference.endpoint import GenerateRequest
from jaxrl.types import Boundary, Rollout, Task
from tests.envs.policies import open_session, path_ids, saying
from tests.envs.verifiers.worlds import Ask, Episode, ToyWorld, scored, user
from tests.fakes import ScriptedEndpoint

Build = Callable[..., VerifiersEnvironment]


@pytest.fixture
def build() -> Iterator[Build]:
    """Give a function that builds an environment of an episode; what it took ends with the test."""
    environments: list[VerifiersEnvironment] = []

    def built(episode: Episode | ToyWorld, **options: Any) -> VerifiersEnvironment:
        world = episode if isinstance(episode, ToyWorld) else ToyWorld(episode)
        environments.append(VerifiersEnvironment("toy", world, **options))
        return environments[-1]

    yield built
    for env in environments:
        env.close()
        env.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "verifiers toy"]


async def play(
    env: VerifiersEnvironment, endpoint: ScriptedEndpoint, *, index: int = 0, deadline_s: float = 20.0, window: int = 512
) -> Rollout:
    spec = env.tasks()[index]
    rollout = Rollout(Task("toy", spec["id"], spec), group_id=f"g{index}", member=0, draw_index=index)
    await play_rollout(env, rollout, open_session(endpoint, rollout, window=window), deadline_s)
    return rollout


async def two_turns(index: int, begin: Callable[[], Ask]) -> Verdict:
    ask, messages = begin(), [{"role": "system", "content": "Count."}, user("one")]
    first = await ask(messages)
    messages.append(user("three"))
    return scored(first, await ask(messages), reward=0.5, metrics={"chars": 7.0, "none": None, "nan": float("nan")})


async def test_an_episode_is_a_rollout_with_the_ids_that_were_sampled_and_the_reward_that_it_was_given(build: Build) -> None:
    endpoint = saying("two", "four")
    rollout = await play(build(two_turns), endpoint)
    assert (rollout.failure, rollout.reward, rollout.stop_reason, rollout.is_truncated) == (None, 0.5, "done", False)
    assert rollout.metrics == {"chars": 7.0, "forks": 0.0}, "a metric that was not taken, or is no number, is left out"
    assert [(node.role, node.content) for node in rollout.nodes] == [
        ("system", "Count."), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"),
    ]  # fmt: skip
    for node, request in zip((2, 4), endpoint.requests, strict=True):
        assert path_ids(rollout, node).tolist() == [*request.token_ids.tolist(), *endpoint.reply(request, 0)]


async def test_rollouts_side_by_side_share_a_client_and_each_is_answered_by_its_own_session(build: Build) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        return scored(await begin()([user(f"task {index}")]), reward=float(index))

    env = build(episode)
    rollouts = await asyncio.gather(*(play(env, saying(f"answer {index}"), index=index) for index in range(3)))
    assert [(rollout.reward, rollout.nodes[-1].content) for rollout in rollouts] == [(float(i), f"answer {i}") for i in range(3)]


@pytest.mark.parametrize(("verdict", "boundary", "words"), [
    (Verdict(error="HarnessError: it exited with 1"), Boundary.ENV, "env 'toy': HarnessError: it exited with 1"),
    (Verdict(error="TaskError: no such file", is_grading=True), Boundary.GRADER, "env 'toy': TaskError: no such file"),
    (scored("another"), Boundary.ENV, "1 replies of the policy, such as 'another', and the policy gave 1"),
    (scored("hello", "hello"), Boundary.ENV, "2 replies of the policy, such as 'hello', and the policy gave 1"),
    (scored("x", "y", replies=None), Boundary.ENV, "2 replies of the policy, and the policy gave 1"),
])  # fmt: skip
async def test_an_episode_that_failed_or_holds_what_the_policy_did_not_say_has_no_reward(
    build: Build, verdict: Verdict, boundary: Boundary, words: str
) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        await begin()([user("hi")])
        return verdict

    rollout = await play(build(episode), saying("hello"))
    assert rollout.failure is not None and rollout.reward is None
    assert rollout.failure.boundary is boundary and words in rollout.failure.message
    assert rollout.nodes[-1].content == "hello", "what was said is in the log"


async def test_an_episode_that_was_not_scored_has_no_reward_and_is_no_failure(build: Build) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        return scored(await begin()([user("hi")]), reward=None)

    rollout = await play(build(episode), saying("hello"))
    assert (rollout.failure, rollout.reward) == (None, None)


async def test_an_episode_that_never_asks_is_a_failure_however_it_was_scored(build: Build) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        begin()
        return scored(reward=0.0)

    rollout = await play(build(episode), saying())
    assert rollout.failure is not None and "ended (agent_completed) without one reply of the policy" in rollout.failure.message


async def test_a_policy_that_fails_is_named_whatever_the_episode_makes_of_it(build: Build) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        with pytest.raises(httpx.HTTPStatusError):
            await begin()([user("hi")])
        return scored(reward=0.0)

    def broken(request: GenerateRequest, version: int) -> list[int]:
        raise EngineError("out of memory")

    rollout = await play(build(episode), ScriptedEndpoint(broken))
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.message) == (Boundary.POLICY, "out of memory")


async def test_a_second_conversation_of_an_episode_gets_no_answer(build: Build) -> None:
    statuses: list[int] = []

    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        said = await begin()([user("hi")])
        with pytest.raises(httpx.HTTPStatusError) as error:
            await begin()([user("hi again")])
        statuses.append(error.value.response.status_code)
        return scored(said)

    rollout = await play(build(episode), saying("hello"))
    assert statuses == [401] and rollout.num_turns == 1


@pytest.mark.parametrize(("is_ok", "reward"), [(True, 0.25), (False, None)])
async def test_a_full_window_ends_a_conversation_that_is_scored_and_fails_one_that_is_not(
    build: Build, is_ok: bool, reward: float | None
) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        ask, messages = begin(), [user("hi")]
        said = await ask(messages)
        messages.append(user("long " * 300))
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(messages)
        return scored(said, reward=0.25) if is_ok else Verdict(error="ProviderError: upstream 400")

    rollout = await play(build(episode), saying("hello"), window=128)
    assert (rollout.reward, rollout.is_truncated) == (reward, True)
    assert rollout.stop_reason == ("window_full" if is_ok else "prompt_too_long")


@pytest.mark.parametrize(("is_ok", "reward"), [(True, 0.25), (False, None)])
async def test_a_request_after_the_budget_is_refused_and_what_was_done_by_then_counts(
    build: Build, is_ok: bool, reward: float | None
) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        ask, messages = begin(), [user("hi")]
        said = await ask(messages)
        messages.append(user("more"))
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(messages)
        return scored(said, reward=0.25) if is_ok else Verdict(error="HarnessError: refused")

    rollout = await play(build(episode, budget=BudgetConfig(max_turns=1)), saying("hello"))
    assert (rollout.failure, rollout.reward, rollout.stop_reason, rollout.is_truncated) == (None, reward, "max_turns", True)


async def test_an_episode_may_block_and_the_run_goes_on(build: Build) -> None:
    is_blocking, may_go_on = threading.Event(), threading.Event()

    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        said = await begin()([user("hi")])
        is_blocking.set()
        assert may_go_on.wait(20)
        return scored(said)

    playing = asyncio.create_task(play(build(episode), saying("hello")))
    await until(is_blocking)
    may_go_on.set()  # never reached if the episode held up this loop
    assert (await playing).reward == 1.0


async def test_a_rollout_that_is_late_is_cancelled_and_its_episode_cleans_up(build: Build) -> None:
    is_clean = threading.Event()

    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        await begin()([user("hi")])
        try:
            await asyncio.Event().wait()
        finally:
            is_clean.set()
        raise AssertionError

    rollout = await play(build(episode), saying("hello"), deadline_s=0.5)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.TIMEOUT
    assert is_clean.is_set()


def holding() -> tuple[Episode, threading.Event, threading.Event]:
    """Return an episode that holds on at task 0, what says that it does, and what lets it end."""
    has_begun, may_end = threading.Event(), threading.Event()

    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        said = await begin()([user("hi")])
        if index == 0:
            has_begun.set()
            while not may_end.is_set():
                await asyncio.sleep(0.01)
        return scored(said)

    return episode, has_begun, may_end


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


async def test_where_room_is_bounded_each_waits_its_turn_and_the_wait_is_no_part_of_its_deadline(build: Build) -> None:
    episode, has_begun, may_end = holding()
    env = build(episode, max_sessions=1)
    first = asyncio.create_task(play(env, saying("hello")))
    await until(has_begun)
    second = asyncio.create_task(play(env, saying("hello"), index=1, deadline_s=1.0))
    await asyncio.sleep(1.2)
    assert not second.done()
    may_end.set()
    assert [(rollout.failure, rollout.reward) for rollout in await asyncio.gather(first, second)] == [(None, 1.0)] * 2


async def test_whoever_waits_too_long_for_room_fails_and_gives_up_its_place_in_the_line(build: Build) -> None:
    episode, has_begun, may_end = holding()
    env = build(episode, max_sessions=1, capacity_deadline_s=0.3)
    first = asyncio.create_task(play(env, saying("hello")))
    await until(has_begun)
    late = await play(env, saying("hello"), index=1)
    assert late.failure is not None and "not this rollout's turn after `capacity_deadline_s`=0.3 s" in late.failure.message
    may_end.set()
    assert (await first).reward == 1.0
    assert (await play(env, saying("hello"), index=1)).reward == 1.0


async def test_a_cancelled_episode_withdraws_its_request_before_that_is_refused(build: Build) -> None:
    raised: list[type[BaseException]] = []
    is_asked = asyncio.Event()

    class Silent:
        """A session that never answers."""

        async def ask(self, messages: Any, *, tools: Any = ()) -> Any:
            is_asked.set()
            await asyncio.Event().wait()

        def fork(self) -> Any:
            return self

        def restart(self) -> Any:
            return self

    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        try:
            await begin()([user("hi")])
        except BaseException as error:
            raised.append(type(error))
            raise
        raise AssertionError

    env = build(episode)
    playing = asyncio.create_task(env.play(env.tasks()[0], Silent()))
    await is_asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert raised == [asyncio.CancelledError]


async def test_a_taskset_that_calls_for_the_end_of_the_process_fails_its_own_rollout(build: Build) -> None:
    async def episode(index: int, begin: Callable[[], Ask]) -> Verdict:
        said = await begin()([user("hi")])
        if index == 0:
            raise SystemExit("enough")
        return scored(said)

    env = build(episode)
    rollout = await play(env, saying("hello"))
    assert rollout.failure is not None and "SystemExit: enough" in rollout.failure.message
    assert (await play(env, saying("hello"), index=1)).reward == 1.0


async def test_what_episodes_share_starts_once_and_ends_with_the_environment(build: Build) -> None:
    world = ToyWorld(two_turns)
    env = build(world)
    assert world.events == [], "nothing starts before something is played"
    await asyncio.gather(*(play(env, saying("two", "four"), index=index) for index in range(3)))
    assert world.events == ["start"]
    env.close()
    assert world.events == ["start", "stop"]
    threads = set(threading.enumerate())
    rollout = await play(env, saying("two", "four"))
    assert rollout.failure is not None and "the server for agents was closed with its environment" in rollout.failure.message
    assert set(threading.enumerate()) <= threads, "what was closed does not start again"


async def test_what_episodes_share_is_started_again_by_the_rollout_after_one_for_which_it_failed(build: Build) -> None:
    env = build(ToyWorld(two_turns, num_failing_starts=1))
    first, second = await play(env, saying("two", "four")), await play(env, saying("two", "four"))
    assert first.failure is not None and "failed to start or to stop: OSError: no port is free" in first.failure.message
    assert second.reward == 0.5


async def test_the_shared_headers_open_no_rollout_by_themselves_and_another_key_opens_nothing() -> None:
    async def never(ask: Any) -> Any:
        raise AssertionError("nobody may come in")

    gateway = Gateway()
    base_url, api_key = gateway.open(never)
    gateway.name(api_key, "trace")
    shared = gateway.shared_headers()
    body = {"messages": [user("hi")]}
    async with httpx.AsyncClient(base_url=base_url, verify=False, trust_env=False) as client:
        for headers in ({}, shared, shared | {SESSION_ID: "another"}, {SHARED_KEY: "guess", SESSION_ID: "trace"}, {SESSION_ID: "trace"}):
            assert (await client.post("/chat/completions", json=body, headers=headers)).status_code == 401
        assert (await client.get("/models", headers=shared)).json()["data"][0]["id"] == "policy"
        assert (await client.get("/models", headers={SHARED_KEY: "guess"})).status_code == 401
        gateway.shut(api_key)
        assert (await client.post("/chat/completions", json=body, headers=shared | {SESSION_ID: "trace"})).status_code == 401
    gateway.close()


def test_a_taskset_gives_its_tasks_in_order_and_no_demonstrations(build: Build) -> None:
    env = build(two_turns)
    assert [spec["id"] for spec in env.tasks()] == ["t0", "t1", "t2"]
    assert env.demonstration(env.tasks()[0]) is None
