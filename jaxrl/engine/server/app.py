"""The server's routes: from an HTTP request to the engine and back.

In go requests, out come replies or refusals. The event loop only moves bytes and awaits: reading bodies, rendering chats, decoding
text and writing JSON are done by worker threads, sampling by the device thread. A request holds its places from admission until
its reply is written, the client is gone, or its deadline passes; whichever comes first cancels it in the engine.

| who waits          | for what                                | bounded by                                     |
|--------------------|-----------------------------------------|------------------------------------------------|
| a request          | its generations and its prompt's scores | `server.request_deadline_s`                    |
| a body             | the rest of its bytes                   | `BODY_DEADLINE_S`, `server.max_body_bytes`     |
| a stream           | its client to read                      | the request's deadline and `SEND_GRACE_S`      |
| the drain          | the requests that are in                | `server.shutdown_deadline_s`, by `launch`      |
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.config.serve import ServeConfig
from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.engine.engine import Engine
from jaxrl.engine.server.bodies import Job, JobReader, no_such_model
from jaxrl.engine.server.chats import Chats
from jaxrl.engine.server.metrics import CONTENT_TYPE, RequestCounter
from jaxrl.engine.server.refusals import refusal_of, stopped
from jaxrl.engine.server.replies import ReplyWriter
from jaxrl.engine.server.streams import EventStream, stream_events
from jaxrl.engine.server.tokenizing import Tokenizing
from jaxrl.engine.server.waits import unless_gone, within
from jaxrl.inference.chat.conversations import ConversationMemory
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.endpoint import Generation, PromptScores
from jaxrl.inference.rendering import Renderer

logger = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "stopping"]
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

BODY_DEADLINE_S = 60.0
"""How long a client may take to send its body."""
RETRY_AFTER_S = 1
"""What a client that found the queue full is told to wait."""
CLIENT_IS_GONE = 499
"""Status of a request whose client hung up; nobody reads it, but it is counted."""
REPLY_PREFIX = {"completion": "cmpl-", "chat": "chatcmpl-", "generate": "generate-tokens-"}


@dataclass(frozen=True, slots=True)
class Backend:
    """A model that is ready to generate."""

    engine: Engine
    endpoint: EmbeddedEndpoint
    renderer: Renderer


class Service:
    """The server as an ASGI application. It starts without a model, refuses what needs one, and serves once it is `attach`ed."""

    def __init__(self, config: ServeConfig, api_key: str | None = None, created: int | None = None) -> None:
        """Build the routes.

        Args:
          config: the server.
          api_key: what requests must bring; None lets everyone in.
          created: Unix time of the start, shown by /v1/models; None is now.
        """
        self._config = config
        self._api_key = api_key
        self._created = int(time.time()) if created is None else created
        self._phase: Phase = "loading"
        self._detail = "starting"
        self._backend: Backend | None = None
        self._reader: JobReader | None = None
        self._tokenizing: Tokenizing | None = None
        self._chats: Chats | None = None
        self._num_sequences = 0
        self._max_sequences = config.engine.num_slots + config.server.max_queue
        self._counter = RequestCounter()
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="text")
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/completions", self._generating(lambda reader: reader.completion), methods=["POST"]),
            Route("/v1/chat/completions", self._generating(lambda reader: reader.chat), methods=["POST"]),
            Route("/inference/v1/generate", self._generating(lambda reader: reader.generate), methods=["POST"]),
            Route("/tokenize", self._route(self._tokenized(lambda tokenizing: tokenizing.tokenize)), methods=["POST"]),
            Route("/detokenize", self._route(self._tokenized(lambda tokenizing: tokenizing.detokenize)), methods=["POST"]),
        ]
        self._paths = frozenset(route.path for route in routes)
        self._app: ASGIApp = Starlette(routes=routes, exception_handlers={HTTPException: _http_refusal})

    @property
    def num_sequences(self) -> int:
        """Sequences that were let in and not answered yet."""
        return self._num_sequences

    def attach(self, backend: Backend) -> None:
        """Serve a model from now on; called in the event loop."""
        engine, server = backend.engine, self._config.server
        memory = ConversationMemory(server.max_conversations, server.max_conversation_tokens)
        self._chats = Chats(backend.renderer, memory, server.history)
        self._reader = JobReader(
            backend.renderer,
            self._chats,
            self._config.served_name,
            max_logprobs=backend.engine.max_logprobs,
            vocab_size=engine.spec.vocab_size,
            window=engine.config.max_model_len,
            max_sequences=self._max_sequences,
        )
        self._tokenizing = Tokenizing(backend.renderer, self._config.served_name, engine.spec.vocab_size, engine.config.max_model_len)
        self._backend = backend
        self._phase = "ready"

    def say_loading(self, detail: str) -> None:
        """Tell /health how far loading is; callable from any thread."""
        self._detail = detail

    def stop_admitting(self) -> None:
        """Refuse new requests; those that are in go on."""
        self._phase = "stopping"

    def close(self) -> None:
        """Give back the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request: the key first, then the route."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_begun = False

        async def counting_send(message: Any) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._counter.count(path, message["status"])
            await send(message)

        if scope["path"] != "/health" and not self._is_allowed(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            text = "missing or wrong API key; send it as `Authorization: Bearer KEY`"
            refusal = Refusal(401, text, code="invalid_api_key", headers=headers)
            await _response(refusal)(scope, receive, counting_send)
            return
        try:
            await self._app(scope, receive, counting_send)
        except asyncio.CancelledError:
            if self._phase != "stopping":
                raise
            # The drain is over. This is the last that the client hears, and nobody waits for this task any more.
            if not is_begun:
                await _response(stopped())(scope, receive, counting_send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._api_key is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Constant time in the key, whatever it is.
        return hmac.compare_digest(key.strip(), self._api_key.encode()) and scheme.lower() == b"bearer"

    # Routes

    async def _health(self, request: Request) -> Response:
        backend, phase, detail = self._backend, str(self._phase), self._detail
        if backend is not None and backend.engine.failure is not None:
            phase, detail = "failed", repr(backend.engine.failure)
        body: dict[str, Any] = {"status": phase}
        if backend is None or phase == "failed":
            body["detail"] = detail
        if backend is not None:
            stats = backend.engine.stats()
            body |= {"version": int(stats["version"]), "running": int(stats["running"]), "waiting": int(stats["waiting"])}
        return _json(body, 200 if phase == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        stats = self._backend.engine.stats() if self._backend is not None else {}
        chats = self._chats.stats() if self._chats is not None else {}
        return Response(self._counter.exposition(stats, chats, self._num_sequences), media_type=CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._config.served_name:
            return _response(no_such_model(name, self._config.served_name))
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._config.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxrl",
            "max_model_len": self._config.engine.max_model_len,
        }

    def _generating(self, reads: Callable[[JobReader], Callable[[bytes], Job]]) -> Handler:
        async def answer(request: Request) -> Response:
            return await self._answer(request, reads)

        return self._route(answer)

    def _tokenized(self, answers: Callable[[Tokenizing], Callable[[bytes], bytes]]) -> Handler:
        async def answer(request: Request) -> Response:
            self._ready()
            assert self._tokenizing is not None
            raw = await self._body(request)
            return Response(await self._off_loop(answers(self._tokenizing), raw), media_type="application/json")

        return answer

    def _route(self, answer: Handler) -> Handler:
        """Turn whatever `answer` raises into a refusal."""

        async def route(request: Request) -> Response:
            try:
                return await answer(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_IS_GONE)
            except Exception as error:
                refusal = refusal_of(error)
                if refusal.status == 500:
                    logger.error("a request failed", exc_info=error)
                return _response(self._failed() or refusal)

        return route

    async def _answer(self, request: Request, reads: Callable[[JobReader], Callable[[bytes], Job]]) -> Response:
        backend, reader, chats = self._ready()
        raw = await self._body(request)
        job = await self._off_loop(reads(reader), raw)
        reply_id = REPLY_PREFIX[job.kind] + (job.request_id or uuid.uuid4().hex)
        name = uuid.uuid4().hex
        requests = job.requests(name)
        for generate_request in requests:
            if (refusal := backend.engine.why_not(generate_request)) is not None:
                raise Refusal(400, str(refusal).partition(": ")[2])
        writer = ReplyWriter(job, reply_id, self._config.served_name, int(time.time()), backend.renderer, chats)
        with contextlib.ExitStack() as places:
            self._admit(job.num_sequences, places)
            deadline_s = self._config.request_deadline_s
            if job.is_stream:
                events = stream_events(requests, writer, backend.endpoint, self._off_loop, deadline_s, self._failed)
                return EventStream(events, places.pop_all(), deadline_s)
            generations, scores = await unless_gone(request.receive, within(deadline_s, _run(job, requests, backend.endpoint)))
            return Response(await self._off_loop(writer.whole, generations, scores), media_type="application/json")

    # Before the engine

    def _ready(self) -> tuple[Backend, JobReader, Chats]:
        if (refusal := self._failed()) is not None:
            raise refusal
        if self._backend is None or self._reader is None or self._chats is None or self._phase != "ready":
            detail = f"the server is {self._phase}" + (f": {self._detail}" if self._phase == "loading" else "")
            raise Refusal(503, detail, code="not_ready", headers={"Retry-After": str(RETRY_AFTER_S)})
        return self._backend, self._reader, self._chats

    def _failed(self) -> Refusal | None:
        failure = self._backend.engine.failure if self._backend is not None else None
        if failure is None:
            return None
        return Refusal(503, f"the engine failed and serves no more: {failure!r}; restart the server", code="engine_failed")

    async def _body(self, request: Request) -> bytes:
        limit = self._config.server.max_body_bytes
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_long(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise _too_long(limit)
        except TimeoutError as error:
            raise Refusal(408, f"the body did not come within {BODY_DEADLINE_S:g} s") from error
        return bytes(body)

    def _admit(self, num: int, places: contextlib.ExitStack) -> None:
        """Take `num` places until `places` is closed."""
        if self._num_sequences + num > self._max_sequences:
            num_slots, max_queue = self._config.engine.num_slots, self._config.server.max_queue
            raise Refusal(
                429,
                f"the queue is full: {self._num_sequences} sequences are in, and {num_slots} slots and a queue of {max_queue} "
                "(`server.max_queue`) are all there is; try again",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._num_sequences += num
        places.callback(self._leave, num)

    def _leave(self, num: int) -> None:
        self._num_sequences -= num

    async def _off_loop(self, call: Callable[..., T], *args: Any) -> T:
        """Call a pure function in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call, *args)


async def _run(job: Job, requests: list[Any], endpoint: EmbeddedEndpoint) -> tuple[list[Generation], list[PromptScores]]:
    """Generate every choice and score every prompt that wants it; the first failure cancels the rest."""
    if len(requests) == 1 and job.prompt_top is None:
        return [await endpoint.generate(requests[0])], []
    try:
        async with asyncio.TaskGroup() as group:
            generating = [group.create_task(endpoint.generate(request)) for request in requests]
            prompts = job.prompts if job.prompt_top is not None else ()
            scoring = [group.create_task(endpoint.score_with_top(token_ids, num_top=job.prompt_top or 0)) for token_ids in prompts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in generating], [task.result() for task in scoring]


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _response(refusal: Refusal) -> Response:
    return Response(refusal.body(), refusal.status, refusal.headers, media_type="application/json")


def _too_long(limit: int) -> Refusal:
    # The rest of the body is not read, so the connection cannot serve another request.
    return Refusal(413, f"the body is longer than `server.max_body_bytes`={limit}", code="body_too_long", headers={"Connection": "close"})


async def _http_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    texts = {404: f"there is no route {path}", 405: f"{request.method} is not for {path}"}
    return _response(Refusal(status, texts.get(status, error.detail), headers=dict(error.headers or {})))
