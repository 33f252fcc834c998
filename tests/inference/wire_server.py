"""A scripted HTTP/1.1 server on loopback: the far side of the wire, with every fault that a test asks for.

A script is called with each request and says what happens: an answer, a wait, a connection that is dropped before or in
the middle of an answer. `FakeModel` is the script of a server that behaves: a toy model whose every logprob is a
function of (token, position), behind the routes that we speak.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MODEL, WINDOW = "toy", 64


@dataclass
class Call:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Answer:
    """What the server does with a request."""

    status: int = 200
    body: Any = None
    """Sent as JSON, or as it is if it is bytes."""
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    cut_at: int | None = None
    """The connection is dropped after this many bytes of the answer."""


Script = Callable[[Call], Answer]


class WireServer:
    """Listens on a free port of loopback while it is entered; `calls` are the requests so far."""

    def __init__(self, script: Script, *, port: int = 0) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.num_closed_early = 0
        """Connections that the client closed while it waited for an answer."""
        self.port = port
        self.num_waiting = self.most_waiting = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def paths(self) -> list[str]:
        """Return the path of each POST so far."""
        return [call.path for call in self.calls if call.method == "POST"]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[WireServer]:
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                while await self._serve_one(reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                tasks.discard(task)
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(method, path, headers, json.loads(content) if content else {})
        self.calls.append(call)
        answer = self.script(call)
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            if answer.wait_s and await self._is_closed_within(reader, answer.wait_s):
                self.num_closed_early += 1
                return False
        finally:
            self.num_waiting -= 1
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        extra = "".join(f"{key}: {value}\r\n" for key, value in answer.headers.items())
        whole = f"HTTP/1.1 {answer.status} x\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body
        if answer.cut_at is not None:
            writer.write(whole[: answer.cut_at])
            await writer.drain()
            return False
        writer.write(whole)
        await writer.drain()
        return True

    async def _is_closed_within(self, reader: asyncio.StreamReader, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                return await reader.read(1) == b""
        except TimeoutError:
            return False


def logprob(token_id: int, position: int) -> float:
    """Return the toy model's logprob of a token at a position."""
    return -0.5 - 0.125 * (token_id % 4) - 0.0625 * (position % 2)


def entry(token_id: int, position: int) -> dict[str, Any]:
    """Return what `prompt_logprobs` says of a position: the token that is there, and another one that is likelier."""
    return {str(token_id + 1): {"logprob": -0.25, "rank": 1}, str(token_id): {"logprob": logprob(token_id, position), "rank": 2}}


class Tokenizer(Protocol):
    """What a `Renderer` is to a server that shows its tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...
    def decode(self, token_ids: Any) -> str: ...


class FakeModel:
    """The script of a well-behaved server: continues with the prompt's last id plus 1, 2, ...

    Subclass it or set `faults`, answers that are given to the next POSTs instead, in order.
    """

    def __init__(
        self,
        *,
        has_tokens_route: bool = True,
        key: str | None = None,
        models: tuple[str, ...] = (MODEL,),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.has_tokens_route = has_tokens_route
        self.tokenizer = tokenizer
        """Answers `/tokenize` and `/detokenize`; None has neither route."""
        self.key = key
        self.models = models
        self.faults: list[Answer] = []
        self.is_well = True
        self.wait_s = 0.0
        self.say: Callable[[str], str] = str.upper
        """What the chat route answers to the last message."""
        self.change: Callable[[dict[str, Any]], None] = lambda answer: None
        """Called with each good answer before it is sent: a test bends it."""

    def __call__(self, call: Call) -> Answer:
        if self.key is not None and call.headers.get("authorization") != f"Bearer {self.key}":
            return Answer(401, {"error": {"message": f"wrong key {call.headers.get('authorization')}"}})
        if call.path == "/health":
            return Answer(200 if self.is_well else 503, b"")
        if call.path == "/v1/models":
            return Answer(200, {"data": [{"id": name, "max_model_len": WINDOW} for name in self.models]})
        if call.path == "/inference/v1/generate" and not self.has_tokens_route:
            return Answer(404, {"detail": "Not Found"})
        if call.path in ("/tokenize", "/detokenize"):
            return self._tokenizing(call)
        if not call.body:
            return Answer(400, {"error": {"message": "no prompt"}})
        if self.faults:
            return self.faults.pop(0)
        if call.body["model"] not in self.models:
            return Answer(404, {"error": {"message": f"The model `{call.body['model']}` does not exist."}})
        answers = {"/inference/v1/generate": self._tokens, "/v1/chat/completions": self._chat}
        answer = answers.get(call.path, self._completion)(call.body)
        self.change(answer)
        return Answer(200, answer, wait_s=self.wait_s)

    def _tokenizing(self, call: Call) -> Answer:
        if self.tokenizer is None:
            return Answer(404, {"detail": "Not Found"})
        if call.path == "/detokenize":
            return Answer(200, {"prompt": self.tokenizer.decode(call.body["tokens"])})
        ids = self.tokenizer.encode(call.body["prompt"], add_special_tokens=call.body["add_special_tokens"])
        return Answer(200, {"count": len(ids), "max_model_len": WINDOW, "tokens": [int(i) for i in ids], "token_strs": None})

    def _sample(self, prompt: list[int], settings: dict[str, Any]) -> tuple[list[int], list[float]]:
        ids = [prompt[-1] + 1 + offset for offset in range(settings["max_tokens"])]
        return ids, [logprob(token_id, len(prompt) + offset) for offset, token_id in enumerate(ids)]

    def _prompt_logprobs(self, prompt: list[int], settings: dict[str, Any]) -> list[Any] | None:
        if "prompt_logprobs" not in settings:
            return None
        return [None, *[entry(token_id, position) for position, token_id in enumerate(prompt)][1:]]

    def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, settings = body["token_ids"], body["sampling_params"]
        ids, logprobs = self._sample(prompt, settings)
        content = [{"token_id": token_id, "logprob": value} for token_id, value in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
        return {"prompt_token_ids": prompt, "choices": [choice], "prompt_logprobs": self._prompt_logprobs(prompt, settings)}

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.say(body["messages"][-1]["content"])}
        return {"choices": [{"index": 0, "finish_reason": "stop", "stop_reason": None, "message": message}]}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        ids, logprobs = self._sample(prompt, body)
        choice = {"index": 0, "text": "?", "finish_reason": "length", "token_ids": ids, "prompt_token_ids": prompt}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [f"token_id:{token_id}" for token_id in ids]}
        choice["prompt_logprobs"] = self._prompt_logprobs(prompt, body)
        return {"choices": [choice]}
