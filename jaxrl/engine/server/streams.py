"""Server-sent events: a reply's tokens on the wire as they are sampled.

In: the engine's tokens, tick by tick. Out: one `data:` event per tick and choice, then the ends, the usage if it was asked for, and
`[DONE]`. A failure after the first byte is an event with an `error`, since the status is sent by then. A client that hangs up
cancels the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxrl.engine.client import EmbeddedEndpoint
from jaxrl.engine.server.refusals import refusal_of, stopped
from jaxrl.engine.server.replies import ReplyWriter
from jaxrl.engine.server.waits import unless_gone
from jaxrl.engine.slots import SampledTokens
from jaxrl.errors import DeadlineError
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.endpoint import GenerateRequest, Generation

logger = logging.getLogger(__name__)

SEND_GRACE_S = 5.0
"""How long past the deadline of its events a client may take to receive them; one that does not read is cut off."""

OffLoop = Callable[..., Awaitable[Any]]
"""Calls a function in a worker thread."""


async def stream_events(
    requests: Sequence[GenerateRequest],
    writer: ReplyWriter,
    endpoint: EmbeddedEndpoint,
    off_loop: OffLoop,
    deadline_s: float,
    failed: Callable[[], Refusal | None],
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream; closing the iterator cancels its requests.

    Args:
      requests: one per choice.
      writer: words the events.
      endpoint: the engine.
      off_loop: where they are worded.
      deadline_s: of the whole stream.
      failed: why the engine serves no more, if so.
    """
    try:
        if opening := writer.opening():
            yield opening
        async with contextlib.aclosing(_arrivals(requests, endpoint, deadline_s)) as arrivals:
            num_tokens = 0
            async for batch in arrivals:
                num_tokens += sum(len(what.token_ids) for _, what in batch if isinstance(what, SampledTokens))
                if events := await off_loop(_word, writer, batch):
                    yield events
        yield writer.last(num_tokens)
    except Exception as error:
        refusal = failed() or refusal_of(error)
        if refusal.status == 500:
            logger.error("a stream failed", exc_info=error)
        yield b"data: " + refusal.body() + b"\n\n"


Arrival = tuple[int, SampledTokens | Generation]
"""A choice, and its next tokens or its end."""


async def _arrivals(requests: Sequence[GenerateRequest], endpoint: EmbeddedEndpoint, deadline_s: float) -> AsyncGenerator[list[Arrival]]:
    """Yield what has come since the last time, in order."""
    queue: asyncio.Queue[Arrival | BaseException] = asyncio.Queue()

    async def follow(index: int, request: GenerateRequest) -> None:
        try:
            end = await endpoint.generate(request, partial(_put, queue, index))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait((index, end))

    tasks = [asyncio.create_task(follow(index, request)) for index, request in enumerate(requests)]
    ends_at = asyncio.get_running_loop().time() + deadline_s
    try:
        num_open = len(tasks)
        while num_open:
            try:
                async with asyncio.timeout_at(ends_at):
                    arrived = [await queue.get()]
            except TimeoutError as error:
                raise DeadlineError(f"the stream did not end within {deadline_s:g} s (`server.request_deadline_s`)") from error
            while not queue.empty():
                arrived.append(queue.get_nowait())
            batch: list[Arrival] = []
            for arrival in arrived:
                if isinstance(arrival, BaseException):
                    raise arrival
                num_open -= isinstance(arrival[1], Generation)
                batch.append(arrival)
            yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _put(queue: asyncio.Queue[Arrival | BaseException], index: int, tokens: SampledTokens) -> None:
    queue.put_nowait((index, tokens))


def _word(writer: ReplyWriter, batch: Sequence[Arrival]) -> bytes:
    words = {SampledTokens: writer.chunk, Generation: writer.closing}
    return b"".join(words[type(what)](index, what) for index, what in batch)


class EventStream(Response):
    """A streaming reply that ends with its client."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], places: contextlib.ExitStack, deadline_s: float) -> None:
        """Take the events, what to close once no more are sent, and the deadline of the events."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._places = places
        self._deadline_s = deadline_s
        self._is_open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event, unless the client hangs up or does not read; if the server stops meanwhile, an error ends them."""
        timer = asyncio.timeout(self._deadline_s + SEND_GRACE_S)
        try:
            with self._places, contextlib.suppress(ClientDisconnect):
                async with timer:
                    await unless_gone(receive, self._send(send))
        except TimeoutError:
            if not timer.expired():
                raise
            logger.warning("a client did not read its stream and was cut off after %g s", self._deadline_s + SEND_GRACE_S)
        except asyncio.CancelledError:
            if self._is_open:
                await send({"type": "http.response.body", "body": b"data: " + stopped().body() + b"\n\n", "more_body": False})
            raise

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._is_open = True
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        self._is_open = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
