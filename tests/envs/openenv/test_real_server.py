"""The client, the session and the environment against the real package, which serves `configs/openenv/sums_server.py` and a game of tests.

Opt-in, because the package is large and needs an environment of its own: JAXRL_OPENENV_PYTHON names its interpreter (docs/testing.md).
"""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from jaxrl.envs.openenv import SyncTaskAPIClient, TaskAPIClient
from jaxrl.envs.openenv.connection import CapacityReachedError, Connection, RefusedError
from jaxrl.errors import ConfigError, EnvError, TaskAPIError, UnknownEnvironmentError
from tests.envs.openenv.test_environment import built, failures, played

PYTHON = os.environ.get("JAXRL_OPENENV_PYTHON")
HERE = Path(__file__).parent
CONFIGS = HERE.parents[2] / "configs" / "openenv"
START_S = 100.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="JAXRL_OPENENV_PYTHON names no interpreter with openenv==0.10.0 and reasoning-gym==0.1.25"),
]


@dataclass(frozen=True)
class RealServer:
    """Where one is."""

    base_url: str


@contextmanager
def served(folder: Path, program: str, **variables: str) -> Iterator[RealServer]:
    """Serve the app of a program, which needs the real package, in its own interpreter."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert PYTHON is not None
    command = [PYTHON, "-m", "uvicorn", f"{program}:app", "--app-dir", str(folder), "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command, env=os.environ | variables)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json() == {"status": "healthy"}:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield RealServer(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def sums() -> Iterator[RealServer]:
    """The server of configs/openenv with room for two sessions."""
    with served(CONFIGS, "sums_server", SUMS_SESSIONS="2") as server:
        yield server


@pytest.fixture(scope="module")
def guessing() -> Iterator[RealServer]:
    """A server of several steps without the Task API."""
    with served(HERE, "guessing_server") as server:
        yield server


async def test_every_route_of_the_task_api_is_answered(sums: RealServer) -> None:
    async with TaskAPIClient.from_ws_url(sums.base_url.replace("http", "ws") + "/ws") as client:
        assert await client.list_environments() == ["sums"]
        assert await client.list_splits() == [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
        assert await client.num_tasks("test") == 200
        assert len(await client.list_tasks("test")) == 10, "a preview"
        assert await client.get_task("test", 3) == {"id": "test-3", "split": "test", "index": 3, "group": "chain_sum", "difficulty": 1}
        assert [task["index"] for task in await client.get_task_range("test", 198)] == [198, 199]
        assert [task["index"] async for task in client.iter_tasks("test")] == list(range(200))
    async with TaskAPIClient(sums.base_url, page_size=7) as client:
        assert [task["index"] async for task in client.iter_tasks("test")] == list(range(200))


async def test_refusals_are_raised_as_what_they_mean_and_the_next_request_is_answered(sums: RealServer) -> None:
    async with TaskAPIClient(sums.base_url) as client:
        for _ in range(5):  # after a 500 the server drops the connection
            with pytest.raises(TaskAPIError, match="answered 500"):
                await client.num_tasks("no such split")
            assert await client.num_tasks("test") == 200
        with pytest.raises(IndexError, match="Invalid task index"):
            await client.get_task("test", 200)
        with pytest.raises(ValueError, match="answered 422"):
            await client.get_task("test", 1.5)  # type: ignore[arg-type]
    with SyncTaskAPIClient(sums.base_url, "chess") as client, pytest.raises(UnknownEnvironmentError, match="unknown environment 'chess'"):
        client.list_splits()
    with pytest.raises(ConfigError, match="it has the splits 'train', 'test'"):
        built(sums, split="valid")


async def test_an_episode_is_reset_by_split_index_and_seed(sums: RealServer) -> None:
    connection = await Connection.open(sums.base_url, deadline_s=30.0)
    first = await connection.reset({"split": "test", "index": 3, "seed": 0})
    assert (first.reward, first.done) == (None, False)
    assert first == await connection.reset({"split": "test", "index": 3, "seed": 0})
    others = [{"split": "test", "index": 4, "seed": 0}, {"split": "test", "index": 3, "seed": 1}, {"split": "train", "index": 3, "seed": 0}]
    assert all([first != await connection.reset(other) for other in others])
    with pytest.raises(RefusedError, match="VALIDATION_ERROR"):
        await connection.step({"reply": "1"})
    with pytest.raises(RefusedError, match="EXECUTION_ERROR"):
        await connection.reset({"split": "nowhere"})
    await connection.reset({"split": "test", "index": 3, "seed": 0})
    terms = first.observation["question"].rpartition(": ")[2].removesuffix(" =").split()
    answer = int(terms[0]) + sum(int(term) * (1 if sign == "+" else -1) for sign, term in zip(terms[1::2], terms[2::2], strict=True))
    last = await connection.step({"answer": str(answer)})
    assert (last.reward, last.done, last.metadata) == (1.0, True, {"service_spend": 0.001})
    await connection.close()


async def test_a_third_session_is_refused_and_the_place_is_free_after_a_close(sums: RealServer) -> None:
    task = {"split": "test", "index": 0, "seed": 0}
    held = [await Connection.open(sums.base_url, deadline_s=30.0) for _ in range(2)]
    for connection in held:
        await connection.reset(task)
    third = await Connection.open(sums.base_url, deadline_s=30.0)
    with pytest.raises(CapacityReachedError, match="2 of 2 sessions are in use"):
        await third.reset(task)
    await third.close()
    for _ in range(20):
        await held.pop(0).close()
        held.append(await Connection.open(sums.base_url, deadline_s=30.0))
        await held[-1].reset(task)
    for connection in held:
        await connection.close()


async def test_8_rollouts_of_a_group_are_played_where_2_have_room(sums: RealServer) -> None:
    env = built(sums, split="test", num_tasks=5)
    rollouts = await played(env, *[env.tasks()[3]] * 8, says=("not a number",))
    assert [(rollout.reward, rollout.failure) for rollout in rollouts] == [(0.0, None)] * 8
    assert len({rollout.nodes[0].content for rollout in rollouts}) == 1
    assert {rollout.metrics["service_spend"] for rollout in rollouts} == {0.001}
    assert sum(rollout.metrics["session_wait_s"] > 0 for rollout in rollouts) >= 6


async def test_a_cancelled_rollout_leaves_no_session_behind(sums: RealServer) -> None:
    env = built(sums, split="test", num_tasks=1)
    for _ in range(3):
        playing = asyncio.create_task(played(env, *[env.tasks()[0]] * 2, says=("1",)))
        await asyncio.sleep(0.02)
        playing.cancel()
        await asyncio.wait([playing])
    (rollout,) = await played(env, env.tasks()[0], says=("1",))
    assert rollout.failure is None


async def test_several_steps_without_the_task_api(guessing: RealServer) -> None:
    with pytest.raises(ConfigError, match=r"the server lists no tasks: .*501"):
        built(guessing)
    env = built(guessing, num_tasks=9, seeds=[18])
    (rollout,) = await played(env, env.tasks()[2], says=("1", "2", "3"))
    assert (rollout.reward, rollout.turn_rewards, rollout.num_turns, rollout.stop_reason) == (1.0, None, 3, "done")
    assert rollout.metrics["service_spend"] == 3.0
    assert [node.content for node in rollout.nodes if node.role == "user"] == ["Guess. ([])", "Wrong.", "Wrong."]
    (unscored,) = await played(env, env.tasks()[2], says=("1",) * 8)
    assert (unscored.reward, unscored.stop_reason, unscored.is_truncated) == (None, "max_turns", True)
    (raised,) = await played(env, env.tasks()[2], says=("1", "raise"))
    assert "(EXECUTION_ERROR): no such guess" in failures([raised])[0]


async def test_a_server_that_is_killed_ends_its_sessions(guessing: RealServer) -> None:
    with served(HERE, "guessing_server") as server:
        connection = await Connection.open(server.base_url, deadline_s=30.0)
        await connection.reset({"seed": 1})
    with pytest.raises(EnvError, match="the server ended the session"):
        await connection.step({"answer": "9"})
    await connection.close()
