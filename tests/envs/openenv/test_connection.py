"""One episode over a WebSocket: observations, the server's refusals, and what is no answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from jaxrl.envs.openenv.connection import CapacityReachedError, Connection, Observation, RefusedError
from jaxrl.errors import EnvError, EnvUnreachableError
from tests.envs.openenv.stub import StubServer, World

TASK = {"split": "train", "index": 3, "seed": 7}


@asynccontextmanager
async def connected(world: World | None = None, *, deadline_s: float = 10.0) -> AsyncIterator[tuple[Connection, StubServer]]:
    with StubServer(world) as server:
        connection = await Connection.open(server.base_url, deadline_s=deadline_s)
        try:
            yield connection, server
        finally:
            await connection.close()


async def test_an_episode_is_reset_stepped_and_closed() -> None:
    async with connected() as (connection, server):
        assert await connection.reset(TASK) == Observation({"question": "Say 3, split train, seed 7."}, None, False)
        assert await connection.step({"answer": "3"}) == Observation({"question": "You said 3."}, 1.0, True, {"service_spend": 0.25})
        await connection.close()
        assert (server.world.sessions, server.world.closed_politely) == (0, 1), "the place is free when `close` returns"
        assert server.world.resets == [TASK]
        with pytest.raises(EnvError, match="cannot be used any more: it was closed"):
            await connection.step({"answer": "3"})


async def test_what_the_environment_refuses_or_raises_leaves_the_session_as_it_was() -> None:
    async with connected() as (connection, _):
        await connection.reset(TASK)
        with pytest.raises(RefusedError, match=r"`step` was refused \(VALIDATION_ERROR\): Invalid message: .*Field required") as refused:
            await connection.step({"reply": "3"})
        assert refused.value.code == "VALIDATION_ERROR"
        with pytest.raises(RefusedError, match=r"\(EXECUTION_ERROR\): the environment raised"):
            await connection.step({"answer": "raise"})
        assert (await connection.step({"answer": "3"})).reward == 1.0


async def test_a_server_without_room_says_how_much_it_has() -> None:
    async with connected(World(capacity=1)) as (connection, server):
        await connection.reset(TASK)
        for _ in range(3):
            second = await Connection.open(server.base_url, deadline_s=10.0)
            with pytest.raises(CapacityReachedError, match="has no room: 1 of 1 sessions are in use"):
                await second.reset(TASK)
            await second.close()
        assert (await connection.step({"answer": "3"})).reward == 1.0


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
async def test_after_an_error_of_the_session_it_is_not_used_again(code: str) -> None:
    frame = json.dumps({"type": "error", "data": {"message": "no world", "code": code}})
    async with connected(World(frame=lambda kind, data: frame)) as (connection, _):
        with pytest.raises(RefusedError, match=rf"\({code}\): no world"):
            await connection.reset(TASK)
        with pytest.raises(EnvError, match="cannot be used any more: no world"):
            await connection.reset(TASK)


def observation(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {}, "reward": None, "done": False} | data})


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        ("hello", "is no JSON: 'hello'"),
        (b"\xff\xfe", "is no JSON"),
        ("[]", "is no observation"),
        ('{"type": "state", "data": {}}', "is no observation"),
        ('{"type": "observation"}', "is no observation"),
        ("[" * 100_000, "is no JSON"),
        (observation(observation=[1]), "is no observation"),
        (observation(reward="1"), "the reward of `reset` must be a finite number or null, got '1'"),
        (observation(reward=float("nan")), "must be a finite number or null, got nan"),
        (observation(reward=10**400), "must be a finite number or null, got 1000"),
        (observation(done="yes"), "`done` of `reset` must be true or false"),
        (observation(metadata=[1]), "`metadata` an object"),
    ],
)
async def test_a_frame_that_is_no_answer_ends_the_session(frame: str | bytes, problem: str) -> None:
    async with connected(World(frame=lambda kind, data: frame if kind == "reset" else None)) as (connection, _):
        with pytest.raises(EnvError, match=problem):
            await connection.reset(TASK)
        with pytest.raises(EnvError, match="cannot be used any more"):
            await connection.step({"answer": "3"})


async def test_true_is_a_reward_of_1_and_metadata_may_stand_in_the_observation_alone() -> None:
    frame = observation(observation={"text": "t", "metadata": {"service_spend": 2}}, reward=True)
    async with connected(World(frame=lambda kind, data: frame if kind == "reset" else None)) as (connection, _):
        assert await connection.reset(TASK) == Observation({"text": "t"}, 1.0, False, {"service_spend": 2})


async def test_metadata_that_stands_in_both_places_is_all_told() -> None:
    frame = observation(observation={"metadata": {"service_spend": 2, "level": 1}}, metadata={"level": 3})
    async with connected(World(frame=lambda kind, data: frame if kind == "reset" else None)) as (connection, _):
        assert (await connection.reset(TASK)).metadata == {"service_spend": 2, "level": 3}


async def test_what_an_environment_raises_is_repeated_in_part_and_in_whole_characters() -> None:
    frame = json.dumps({"type": "error", "data": {"message": "\ud800" + "x" * 100_000, "code": "EXECUTION_ERROR"}})
    async with connected(World(frame=lambda kind, data: frame if kind == "reset" else None)) as (connection, _):
        with pytest.raises(RefusedError, match="\ufffdxxx") as refused:
            await connection.reset(TASK)
        assert len(str(refused.value)) < 3000 and str(refused.value).encode()


async def test_a_server_that_never_answers_or_needs_a_password_is_named_without_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EnvUnreachableError, match=rf"^ws://127\.0\.0\.1:{port}/ws: no session can be opened: TimeoutError"):
            await Connection.open(f"http://me:secret@127.0.0.1:{port}", deadline_s=0.2)


@pytest.mark.parametrize("code", [1001, 1011])
async def test_a_session_that_the_server_ends_in_an_episode_says_with_which_code(code: int) -> None:
    async def refuse(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.close(code, "restarting")

    async with serve(refuse, "127.0.0.1", 0) as server:
        connection = await Connection.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", deadline_s=5.0)
        with pytest.raises(EnvError, match=rf"the server ended the session: .*{code}.*restarting"):
            await connection.reset(TASK)
        await connection.close()


async def test_a_frame_of_20_megabytes_arrives() -> None:
    frame = observation(observation={"text": "x" * 20_000_000})
    async with connected(World(frame=lambda kind, data: frame if kind == "reset" else None)) as (connection, _):
        assert len((await connection.reset(TASK)).observation["text"]) == 20_000_000


async def test_a_late_answer_ends_the_session_and_is_never_taken_for_another_one() -> None:
    async with connected(World(answer_gate=asyncio.Event()), deadline_s=0.2) as (connection, _):
        with pytest.raises(EnvError, match=r"`reset` was not answered in 0\.2 s"):
            await connection.reset(TASK)
        with pytest.raises(EnvError, match="cannot be used any more"):
            await connection.step({"answer": "3"})


async def test_a_cancelled_request_ends_the_session() -> None:
    async with connected(World(answer_gate=asyncio.Event())) as (connection, _):
        request = asyncio.create_task(connection.reset(TASK))
        await asyncio.sleep(0.05)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        with pytest.raises(EnvError, match="was cancelled before its answer came"):
            await connection.step({"answer": "3"})
        await connection.close()


async def test_a_server_that_dies_in_an_episode_and_one_that_is_gone_are_said_as_such() -> None:
    async with connected(World(dies_after=0)) as (connection, server):
        with pytest.raises(EnvError, match="the server ended the session"):
            await connection.reset(TASK)
        await asyncio.to_thread(server.stop)
        with pytest.raises(EnvUnreachableError, match=r"no session can be opened: .*is the server running there"):
            await Connection.open(server.base_url, deadline_s=5.0)


async def test_an_action_that_is_no_json_is_not_sent() -> None:
    async with connected() as (connection, server):
        await connection.reset(TASK)
        with pytest.raises(ValueError, match="JSON"):
            await connection.step({"answer": float("nan")})
        assert server.world.steps == []
