"""A server on loopback that keeps the contract of OpenEnv 0.10 (Task API, episodes over a WebSocket), or breaks it as a test asks.

Its world: task `index` of a split asks `(split, index, seed)`, the right answer is the index. The real package is played against in
`test_real_server.py`.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

START_S = 10.0


@dataclass
class World:
    """What the server has, and how it misbehaves."""

    splits: dict[str, int] = field(default_factory=lambda: {"train": 5, "test": 3})
    env_name: str = "stub"
    has_task_api: bool = True
    has_ranges: bool = True
    page_error: int = 0
    """Tasks that a page has too many, or too few."""
    capacity: int = 100
    num_steps: int = 1
    """Steps after which an episode is done."""
    ignores_seed: bool = False
    ignores_index: bool = False
    gives_reward: bool = True
    dies_after: int | None = None
    """Episodes after which the server is gone."""
    frame: Callable[[str, dict[str, Any]], str | bytes | None] = lambda kind, data: None
    """What is sent in place of an answer to (kind of request, its data), if anything."""
    answer_gate: asyncio.Event | None = None
    """An answer waits for it, if there is one."""
    hangs_up: bool = True
    """Whether it ends a connection that it refused."""
    metadata: dict[str, Any] = field(default_factory=lambda: {"service_spend": 0.25})

    sessions: int = 0
    most_sessions: int = 0
    num_episodes: int = 0
    refusals: int = 0
    refused_open: int = 0
    """Connections that were refused and are not closed."""
    resets: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    closed_politely: int = 0
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return a task as the server tells of it."""
        return {"id": f"{split}/{index}", "difficulty": index % 2, "group": "stub", "index": index}


class StubServer:
    """Serves one world in a thread of its own, for the body of a `with`."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/list_environments", self._environments),
            Route("/{env}/splits", self._splits),
            *(Route(f"/{{env}}/{name}", self._tasks, methods=["POST"]) for name in ("tasks", "num_tasks", "task", "task_range")),
            WebSocketRoute("/ws", self._episode),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", ws="websockets-sansio")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._server.run([self._socket]), name="stub server", daemon=True)

    def __enter__(self) -> "StubServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server at once, whatever is connected."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_S)
        assert not self._thread.is_alive()

    async def _environments(self, request: Request) -> Response:
        return JSONResponse([self.world.env_name])

    def _refusal(self, request: Request) -> Response | None:
        env = request.path_params["env"]
        if env.lower() != self.world.env_name.lower():
            return JSONResponse({"detail": f"unknown environment {env!r}"}, 404)
        return None if self.world.has_task_api else JSONResponse({"detail": "environment has no tasks"}, 501)

    async def _splits(self, request: Request) -> Response:
        splits = [{"name": name, "type": name if name in ("train", "test") else "validation"} for name in self.world.splits]
        return self._refusal(request) or JSONResponse(splits)

    async def _tasks(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body, route, world = await request.json(), request.url.path.rpartition("/")[2], self.world
        world.bodies.append((route, body))
        known = {"task": {"split", "index"}, "task_range": {"split", "start", "stop"}}.get(route, {"split"})
        if not set(body) <= known or "split" not in body or not isinstance(body.get("index", 0), int):
            return JSONResponse({"detail": [{"loc": ["body"], "msg": "Field required"}]}, 422)
        if body["split"] not in world.splits:
            return PlainTextResponse("Internal Server Error", 500, {"connection": "close"})
        total = world.splits[body["split"]]
        tasks = [world.task(body["split"], index) for index in range(total)]
        match route:
            case "tasks":
                return JSONResponse({"tasks": tasks[:2], "env_name": world.env_name})  # a preview
            case "num_tasks":
                return JSONResponse({"num_tasks": total})
            case "task" if not 0 <= body["index"] < total:
                return JSONResponse({"detail": "Invalid task index"}, 400)
            case "task":
                return JSONResponse({"task": tasks[body["index"]]})
        if not world.has_ranges:
            return JSONResponse({"detail": "get_task_range is not implemented"}, 501)
        page = tasks[slice(body.get("start"), body.get("stop"))]
        return JSONResponse({"tasks": page[: world.page_error] if world.page_error < 0 else page + page[: world.page_error]})

    async def _episode(self, socket: WebSocket) -> None:
        await socket.accept()
        world = self.world
        if world.sessions >= world.capacity:
            world.refusals += 1
            full = {"message": "no room", "code": "CAPACITY_REACHED", "active_sessions": world.sessions, "max_sessions": world.capacity}
            await socket.send_json({"type": "error", "data": full})
            world.refused_open += 1
            with contextlib.suppress(WebSocketDisconnect):
                while not world.hangs_up:
                    await socket.receive_text()
                await socket.close()
            world.refused_open -= 1
            return
        world.sessions += 1
        world.most_sessions = max(world.most_sessions, world.sessions)
        try:
            with contextlib.suppress(WebSocketDisconnect):
                async for answer in self._answers(socket):
                    await (socket.send_bytes if isinstance(answer, bytes) else socket.send_text)(answer)
        finally:
            world.sessions -= 1
        with contextlib.suppress(RuntimeError):
            await socket.close()

    async def _answers(self, socket: WebSocket) -> AsyncIterator[str | bytes]:
        world, episode, num_steps = self.world, {}, 0
        while True:
            message = json.loads(await socket.receive_text())
            kind, data = message["type"], message.get("data", {})
            if world.answer_gate is not None:
                await world.answer_gate.wait()
            if (answer := world.frame(kind, data)) is not None:
                yield answer
                continue
            match kind:
                case "close":
                    world.closed_politely += 1
                    return
                case "reset":
                    world.resets.append(data)
                    world.num_episodes += 1
                    if world.dies_after is not None and world.num_episodes > world.dies_after:
                        for listening in self._server.servers:
                            listening.close()
                        self._server.should_exit = self._server.force_exit = True
                        await socket.close(1011)
                        return
                    episode, num_steps = data, 0
                    yield self._observation({"question": self._question(data)}, None, False)
                case "step" if set(data) != {"answer"}:
                    errors = [{"loc": ["answer"], "msg": "Field required"}]
                    yield _error("VALIDATION_ERROR", "Invalid message", errors=errors)
                case "step" if data["answer"] == "raise":
                    yield _error("EXECUTION_ERROR", "the environment raised")
                case "step":
                    world.steps.append(data)
                    num_steps += 1
                    reward = float(data["answer"] == str(episode.get("index", episode.get("seed")))) if world.gives_reward else None
                    told = {"question": f"You said {data['answer']}."}
                    yield self._observation(told, reward, num_steps == world.num_steps, world.metadata)
                case _:
                    yield _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def _question(self, data: dict[str, Any]) -> str:
        world = self.world
        index = 0 if world.ignores_index else data.get("index")
        seed = f"chance {world.num_episodes}" if world.ignores_seed else data.get("seed")
        return f"Say {index}, split {data.get('split')}, seed {seed}."

    def _observation(self, fields: dict[str, Any], reward: float | None, done: bool, metadata: dict[str, Any] | None = None) -> str:
        data = {"observation": {**fields, "metadata": metadata or {}}, "reward": reward, "done": done}
        return json.dumps({"type": "observation", "data": data | ({"metadata": metadata} if metadata else {})})


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})
