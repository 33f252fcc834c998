"""The HTTP server that agents talk to: the chat route of OpenAI's API, on this machine alone, with a key for each rollout.

In: rollouts that are opened and shut. Out: a base URL and a key; requests that come with the key go to that rollout, in its event loop.
A client that speaks for many rollouts has one set of headers for all of them, and names the rollout in `X-Session-ID`. The server has a
thread of its own, so what is read and checked here holds up no rollout. It knows nothing of conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxrl.envs.gateway.bodies import Ask, Told, models_body, over, read_ask, retry_headers, stream_body, whole_body
from jaxrl.errors import EnvError
from jaxrl.inference.chat.refusals import Refusal

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
"""A longer body is refused unread."""
KEEP_ALIVE_S = 60
"""How long an idle connection stays open: clients keep theirs in pools."""
STOP_S = 5.0
"""How long `close` waits for the server's thread, which may be in the middle of a request."""

SHARED_KEY = "X-Jaxrl-Key"
"""Header of clients that speak for many rollouts: a key that lets each of them name the rollout of a request."""
SESSION_ID = "X-Session-ID"
"""Header in which they name it."""

Answer = Callable[[Ask], Awaitable[Told]]


@dataclass(frozen=True, slots=True)
class _Door:
    """Where the requests of one rollout go."""

    secret: str
    answer: Answer
    loop: asyncio.AbstractEventLoop


class Gateway:
    """A server of one process. It starts with the first rollout. Thread-safe."""

    def __init__(self) -> None:
        self._doors: dict[str, _Door] = {}
        self._named: dict[str, _Door] = {}
        self._shared_key = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._server: _Uvicorn | None = None
        self._thread: threading.Thread | None = None
        self._base_url = ""
        self._is_closed = False

    def open(self, answer: Answer) -> tuple[str, str]:
        """Let the requests of one rollout in.

        Args:
          answer: called in the current event loop with each of them; a `Refusal` that it raises is told to the client.

        Returns:
          Base URL and API key.

        Raises:
          EnvError: it was closed.
        """
        name, secret = secrets.token_hex(8), secrets.token_hex(16)
        with self._lock:
            if self._is_closed:
                raise EnvError("the server for agents was closed with its environment; nothing is played there any more")
            if self._thread is None:
                self._start()
            self._doors[name] = _Door(secret, answer, asyncio.get_running_loop())
        return self._base_url, f"{name}.{secret}"

    def shut(self, api_key: str) -> None:
        """Let no further request of a rollout in."""
        with self._lock:
            door = self._doors.pop(api_key.partition(".")[0], None)
            for session_id in [name for name, named in self._named.items() if named is door]:
                del self._named[session_id]

    def shared_headers(self) -> dict[str, str]:
        """Return the headers of a client that speaks for many rollouts."""
        return {SHARED_KEY: self._shared_key}

    def name(self, api_key: str, session_id: str) -> None:
        """Let the requests of an open rollout in, too, that come with the shared headers and this session id."""
        with self._lock:
            if (door := self._doors.get(api_key.partition(".")[0])) is not None:  # else the rollout is over already
                self._named[session_id] = door

    def close(self) -> None:
        """Stop the server. May be called twice."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            if self._server is not None:
                self._server.should_exit = True
        if thread is not None:
            thread.join(STOP_S)

    def _start(self) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)  # from here on clients can connect; they are answered when the thread has begun
        self._base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._server = _Uvicorn(
            uvicorn.Config(
                self._serve,
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                interface="asgi3",
                http="h11",
                ws="none",
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=_run, args=(self._server, listener), name="agent gateway", daemon=True)
        self._thread.start()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._respond(request)
        except Refusal as refusal:
            response = _refused(refusal)
        except ClientDisconnect:
            return
        except RecursionError:
            response = _refused(Refusal(400, "the body is nested too deeply"))
        except Exception as error:
            logger.exception("the server for agents failed on a request")
            response = _refused(Refusal(500, f"the server failed on this request: {type(error).__name__}; its log says more"))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        routes = {"/v1/models": "GET", "/v1/chat/completions": "POST"}
        path = request.url.path
        if path not in routes:
            raise Refusal(404, f"there is no route {path[:100]!r}; there are {' and '.join(routes)}")
        if request.method != routes[path]:
            raise Refusal(405, f"{path} takes {routes[path]}, not {request.method}")
        if path == "/v1/models" and self._is_shared(request):  # those who ask for it name no rollout
            return Response(models_body(), media_type="application/json")
        door = self._door(request)
        if path == "/v1/models":
            return Response(models_body(), media_type="application/json")
        ask = read_ask(await _body(request))
        told = await _answered(door, ask, request)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": ask.model}
        if ask.is_stream:
            return Response(stream_body(told, head, has_usage=ask.has_stream_usage), media_type="text/event-stream")
        return Response(whole_body(told, head), media_type="application/json")

    def _door(self, request: Request) -> _Door:
        """Return the rollout whose key a request has, or which it may name."""
        if self._is_shared(request):
            with self._lock:
                door = self._named.get(request.headers.get(SESSION_ID, ""))
            if door is None:
                raise over()
            return door
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        name, _, secret = key.strip().partition(".")
        with self._lock:
            door = self._doors.get(name)
        if scheme.lower() != "bearer" or door is None or not hmac.compare_digest(door.secret.encode(), secret.encode()):
            raise over()
        return door

    def _is_shared(self, request: Request) -> bool:
        return hmac.compare_digest(request.headers.get(SHARED_KEY, "").encode(), self._shared_key.encode())


class _Uvicorn(uvicorn.Server):
    """A uvicorn that leaves signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with contextlib.closing(listener):
        asyncio.run(server.serve(sockets=[listener]))


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.body(), refusal.status, retry_headers(refusal.status), "application/json")


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise Refusal(413, f"the body has more than {MAX_BODY_BYTES // 2**20} MiB; send a shorter conversation")
        parts.append(part)
    return b"".join(parts)


async def _answered(door: _Door, ask: Ask, request: Request) -> Told:
    """Have a request answered in its rollout's event loop, for as long as the client waits and the rollout goes on.

    Raises:
      ClientDisconnect: nobody waits for the reply any more.
      Refusal: there is none.
    """

    async def answer() -> Told:
        return await door.answer(ask)

    coroutine = answer()
    try:
        future: Future[Told] = asyncio.run_coroutine_threadsafe(coroutine, door.loop)
    except RuntimeError:  # the loop of the rollout has ended
        coroutine.close()
        raise over() from None
    replied = asyncio.wrap_future(future)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({replied, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not replied.done():
            raise ClientDisconnect
        if replied.cancelled():
            raise over()
        return replied.result()
    finally:
        gone.cancel()
        replied.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
