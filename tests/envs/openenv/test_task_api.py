"""What a server tells of its tasks, what its refusals are raised as, and what becomes of a lost connection."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jaxrl.envs.openenv import SyncTaskAPIClient, TaskAPIClient
from jaxrl.errors import ConfigError, EnvUnreachableError, TaskAPIError, UnknownEnvironmentError
from tests.envs.openenv.stub import StubServer, World


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    """A server with 5 training tasks that behaves, but for the split `none`, which is empty."""
    with StubServer(World(splits={"train": 5, "none": 0})) as server:
        yield server


async def test_every_route_is_answered(server: StubServer) -> None:
    async with TaskAPIClient(server.base_url) as client:
        assert await client.list_environments() == ["stub"]
        assert await client.list_splits() == [{"name": "train", "type": "train"}, {"name": "none", "type": "validation"}]
        assert [task["id"] for task in await client.list_tasks("train")] == ["train/0", "train/1"], "the stub's preview"
        assert await client.num_tasks("train") == 5
        assert await client.get_task("train", 4) == {"id": "train/4", "difficulty": 0, "group": "stub", "index": 4}
        assert [task["index"] for task in await client.get_task_range("train", 1, 3)] == [1, 2]
        assert [task["index"] for task in await client.get_task_range("train", 3)] == [3, 4]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 6, 256])
async def test_tasks_come_once_each_in_order_for_any_page_size(server: StubServer, page_size: int) -> None:
    async with TaskAPIClient(server.base_url, page_size=page_size) as client:
        assert [task["index"] async for task in client.iter_tasks("train")] == [0, 1, 2, 3, 4]
        assert [task["index"] async for task in client.iter_tasks("train", 3)] == [0, 1, 2]
        assert [task async for task in client.iter_tasks("none")] == []


async def test_a_page_never_reaches_beyond_the_tasks_that_there_are(server: StubServer) -> None:
    server.world.bodies.clear()
    async with TaskAPIClient(server.base_url, "stub", page_size=3) as client:
        assert len([task async for task in client.iter_tasks("train")]) == 5
    assert server.world.bodies == [
        ("num_tasks", {"split": "train"}),
        ("task_range", {"split": "train", "start": 0, "stop": 3}),
        ("task_range", {"split": "train", "start": 3, "stop": 5}),
    ]


async def test_a_server_without_ranges_is_asked_for_one_task_after_the_other() -> None:
    with StubServer(World(has_ranges=False)) as server:
        async with TaskAPIClient(server.base_url) as client:
            assert [task["index"] async for task in client.iter_tasks("train")] == [0, 1, 2, 3, 4]
        assert [route for route, _ in server.world.bodies] == ["num_tasks", "task_range", *["task"] * 5]


@pytest.mark.parametrize(("page_error", "number"), [(-1, 1), (1, 3)])
async def test_a_page_of_another_length_is_an_error_and_not_asked_for_again(page_error: int, number: int) -> None:
    with StubServer(World(page_error=page_error)) as server:
        async with TaskAPIClient(server.base_url, page_size=2) as client:
            with pytest.raises(TaskAPIError, match=f"has 5 tasks, and the range from 0 to 2 came with {number}$"):
                [task async for task in client.iter_tasks("train")]
        assert len(server.world.bodies) == 2


async def test_refusals_are_raised_as_what_they_mean(server: StubServer) -> None:
    async with TaskAPIClient(server.base_url) as client:
        with pytest.raises(IndexError, match="answered 400: Invalid task index"):
            await client.get_task("train", 5)
        with pytest.raises(TaskAPIError, match="answered 500: Internal Server Error"):
            await client.num_tasks("no such split")
        with pytest.raises(ValueError, match=r"answered 422: .*Field required"):
            await client.get_task("train", 1.5)  # type: ignore[arg-type]
        with pytest.raises(IndexError, match="is negative"):
            await client.get_task("train", -1)
        with pytest.raises(ValueError, match="begins and ends at 0 or above"):
            await client.get_task_range("train", -2)
    async with TaskAPIClient(server.base_url, "other") as client:
        with pytest.raises(UnknownEnvironmentError, match="answered 404: unknown environment"):
            await client.list_splits()
    assert issubclass(UnknownEnvironmentError, LookupError)
    with StubServer(World(has_task_api=False)) as bare:
        async with TaskAPIClient(bare.base_url) as client:
            with pytest.raises(NotImplementedError, match="answered 501"):
                await client.num_tasks("train")


@asynccontextmanager
async def raw_server(*answers: Any) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield the address of a server that gives its answers one after the other, and for each request the number of its connection.

    An answer is JSON, or None, which ends the connection when the request is there. Connections are kept alive until then.
    """
    left, connections, numbers = list(answers), 0, list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number, connections = connections, connections + 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [int(line[15:]) for line in head.decode().splitlines() if line.lower().startswith("content-length:")]
                await reader.readexactly(sum(length))
                numbers.append(number)
                answer = left.pop(0)
                if answer is None:
                    return
                body = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", numbers


async def test_a_request_whose_connection_is_lost_is_sent_once_more_on_a_new_one() -> None:
    async with raw_server({"num_tasks": 3}, None, {"num_tasks": 4}) as (url, numbers), TaskAPIClient(url, "e") as client:
        assert await client.num_tasks("train") == 3
        assert await client.num_tasks("train") == 4
    assert numbers == [0, 0, 1]


async def test_the_second_try_takes_none_of_the_connections_that_may_be_lost_too() -> None:
    answers = [{"num_tasks": 1}, {"num_tasks": 1}, None, {"num_tasks": 4}]
    async with raw_server(*answers) as (url, numbers), TaskAPIClient(url, "e") as client:
        await asyncio.gather(client.num_tasks("train"), client.num_tasks("test"))
        assert await client.num_tasks("train") == 4
    assert sorted(numbers[:2]) == [0, 1] and numbers[3] == 2


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_a_connection_that_is_always_lost_is_given_up_after_the_tries(retries: int) -> None:
    async with raw_server(*[None] * 9) as (url, numbers), TaskAPIClient(url, "e", retries=retries) as client:
        with pytest.raises(EnvUnreachableError, match="the connection was lost"):
            await client.num_tasks("train")
    assert len(numbers) == 1 + retries


@pytest.mark.parametrize("answer", [{}, {"num_tasks": -1}, {"num_tasks": "3"}, {"num_tasks": True}, [3], "3"])
async def test_an_answer_that_is_no_number_of_tasks_is_an_error(answer: Any) -> None:
    async with raw_server(answer) as (url, _), TaskAPIClient(url, "e") as client:
        with pytest.raises(TaskAPIError, match="num_tasks"):
            await client.num_tasks("train")


async def test_the_only_environment_is_taken_and_one_of_several_must_be_named() -> None:
    async with raw_server(["a", "b"]) as (url, _), TaskAPIClient(url) as client:
        with pytest.raises(UnknownEnvironmentError, match="has 2 environments; name one of them: a, b"):
            await client.num_tasks("train")
    async with raw_server({"detail": "?"}) as (url, _), TaskAPIClient(url) as client:
        with pytest.raises(TaskAPIError, match="must be a list of strs"):
            await client.list_environments()


async def test_nobody_at_the_address_and_nobody_who_answers_are_said_as_such() -> None:
    async with raw_server() as (url, _):
        pass
    async with TaskAPIClient(url) as client:
        with pytest.raises(EnvUnreachableError, match=r"the server cannot be reached: ConnectError.*is it running there"):
            await client.list_environments()
    assert issubclass(EnvUnreachableError, ConfigError)

    ended = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    mute = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with mute:
        client = TaskAPIClient(f"http://127.0.0.1:{mute.sockets[0].getsockname()[1]}", timeout=0.05)
        with pytest.raises(EnvUnreachableError, match=r"no answer after 0\.05 s"):
            await client.list_environments()
        await client.close()
        await ended.wait()


async def test_plain_code_lists_tasks_also_while_an_event_loop_runs(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a server on this machine is not asked through it
    with SyncTaskAPIClient.from_ws_url(server.base_url.replace("http", "ws") + "/ws", page_size=2) as client:
        assert client.base_url == server.base_url
        assert [task["index"] for task in client.iter_tasks("train")] == [0, 1, 2, 3, 4]
        assert (client.num_tasks("train"), client.get_task("train", 1)["index"]) == (5, 1)
        assert [len(client.list_environments()), len(client.list_splits()), len(client.list_tasks("train"))] == [1, 2, 2]
        assert len(client.get_task_range("train", 2)) == 3
        with pytest.raises(IndexError):
            client.get_task("train", 9)
    client.close()
    other = TaskAPIClient(server.base_url)
    with other.sync() as client:
        assert client.num_tasks("train") == 5
    await other.close()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"page_size": 0}, {"retries": -1}, {"base_url": "ftp://x"}, {"base_url": "http://"}])
def test_senseless_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        TaskAPIClient(**{"base_url": "http://127.0.0.1:1", **options})
