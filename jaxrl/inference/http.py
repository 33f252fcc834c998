"""One server that speaks the routes of OpenAI and vLLM, as a frozen endpoint: tokens in, tokens out, logprobs, health.

In: a base URL, the model's name, a key. Out: the `Endpoint` protocol, and what the server's tokenizer makes of texts and
ids. The first call finds out whether the server has the token route (`wire.TOKENS_PATH`); if not, completions with a
prompt of ids are used from then on. Cancelling a call closes its connection, which is how such servers learn of it. What
may be sent again is decided in `backoff`, what an answer means in `wire`; another server is never tried here (`frozen`
does that).

| what waits | for what                                | ends by                               |
|------------|-----------------------------------------|---------------------------------------|
| a call     | the answer, with tries and pauses       | `timeout_s`, from when it was made    |
| a connect  | the server's side of it                 | `CONNECT_DEADLINE_S`, then a new try  |
| a probe    | `/health` and `/v1/models`              | `PROBE_DEADLINE_S`                    |
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import numpy as np

from jaxrl.blame import headline
from jaxrl.config.dump import redact
from jaxrl.errors import DeadlineError, EndpointDownError, EngineError, JaxrlError, PromptTooLongError
from jaxrl.inference import wire
from jaxrl.inference.backoff import BUSY_STATUSES, LOST_CONNECTIONS, Backoff, retry_after_s
from jaxrl.inference.endpoint import NO_VERSION, ChatReply, ChatRequest, EndpointHealth, GenerateRequest, Generation

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 10.0
PROBE_DEADLINE_S = 10.0
MAX_ANSWER_BYTES = 256 * 2**20
"""A longer answer is not read to its end: the scores of a million tokens are less."""
T = TypeVar("T")

_NO_ROUTE_STATUSES = (403, 404, 405, 501)
"""What servers answer on a route that they do not have, or that is switched off."""
_TOO_LONG = re.compile(r"context.length|max_model_len|maximum (?:model |context )?length|too long|longer than|no room", re.IGNORECASE)


class HttpEndpoint:
    """A frozen model behind one server. Used from one event loop."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        api_key_var: str | None = None,
        timeout_s: float = 600.0,
        max_attempts: int = 5,
        max_connections: int = 64,
        backoff: Backoff | None = None,
    ) -> None:
        """Open no connection yet.

        Args:
          base_url: ends in `/v1`.
          model: the name under which the server lists it.
          api_key: sent as a bearer token; never shown.
          api_key_var: the name of the variable that holds it, for error messages.
          timeout_s: deadline of one call, its tries and pauses included.
          max_attempts: tries of one call.
          max_connections: calls on the wire at the same time; further ones wait for one to end.
          backoff: the pauses between tries.

        Raises:
          ConfigError: the key cannot be sent.
        """
        if api_key is not None:
            wire.check_key(api_key, f"in the environment variable {api_key_var}" if api_key_var else "that was given")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._root = self.base_url.removesuffix("/v1")
        self._where = f"{model!r} at {self.base_url}"
        self._api_key = api_key
        self._api_key_var = api_key_var
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._backoff = backoff or Backoff()
        self._window: int | None = None
        self._path: str | None = None
        self._is_plain = False
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            # The call's own deadline bounds everything else. One connection more is for probes.
            timeout=httpx.Timeout(None, connect=CONNECT_DEADLINE_S),
            limits=httpx.Limits(max_connections=max_connections + 1, max_keepalive_connections=max_connections + 1),
        )

    def __repr__(self) -> str:
        return f"HttpEndpoint({self.base_url!r}, {self.model!r})"

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Endpoint.generate`. If the server told its window, the reply is cut there, as the embedded engine does.

        Note: the logprobs are of the kind that the server reports. vLLM gives those before the temperature, unless it was
        started with `--logprobs-mode processed_logprobs`.
        """
        what = f"request {request.request_id!r}"
        if request.num_top_logprobs:
            raise EngineError(f"{self._where}: {what}: alternatives (`num_top_logprobs`) are not asked of servers; leave it at 0")
        request = self._within_window(request, what)
        return await self._ask(
            what,
            lambda path: wire.generate_body(path, self.model, request),
            lambda content, path: wire.read_generation(content, path, request),
        )

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation in words.

        A server that knows no settings but those of OpenAI's own API is asked without the others from then on.

        Raises:
          PromptTooLongError: the server says so.
          EngineError: the request was refused, or its answer cannot be used.
          DeadlineError: no answer came in time.
        """
        try:
            return await self._chat(request, is_plain=self._is_plain)
        except EngineError as error:
            if self._is_plain or not wire.refuses_extensions(str(error), request):
                raise
        self._is_plain = True
        logger.warning("%s takes no %s, so its own settings of these hold", self._where, ", ".join(wire.EXTENSIONS))
        return await self._chat(request, is_plain=True)

    async def _chat(self, request: ChatRequest, *, is_plain: bool) -> ChatReply:
        return await self._ask(
            f"request {request.request_id!r}",
            lambda _: wire.chat_body(self.model, request, is_plain=is_plain),
            lambda content, _: wire.read_chat(content, request),
            path=wire.CHAT_PATH,
        )

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `Endpoint.score`; only at temperature 1, because servers give the logprobs of prompts before any temperature."""
        if temperature != 1.0:
            raise EngineError(
                f"{self._where}: scores at temperature {temperature:g} are not to be had: servers report the logprobs of a prompt at "
                "temperature 1, whatever is asked for; score at 1"
            )
        if token_ids.ndim != 1 or len(token_ids) == 0:
            raise EngineError(f"{self._where}: `score` takes one sequence of at least one token, got shape {token_ids.shape}")
        return await self._ask(
            f"score of {len(token_ids)} tokens",
            lambda path: wire.score_body(path, self.model, token_ids),
            lambda content, _: wire.read_scores(content, token_ids),
        )

    async def tokenize(self, text: str) -> np.ndarray | None:
        """Return [n] int32 ids that the server makes of a text, none added around it; None if it has no such route."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return await self._ask_tokenizer("the ids of a text", wire.TOKENIZE_PATH, body, wire.read_tokenized)

    async def detokenize(self, token_ids: np.ndarray) -> str | None:
        """Return the text that the server makes of ids, special tokens included; None if it has no such route."""
        body = {"model": self.model, "tokens": token_ids.tolist()}
        return await self._ask_tokenizer(f"the text of {len(token_ids)} ids", wire.DETOKENIZE_PATH, body, wire.read_detokenized)

    async def health(self) -> EndpointHealth:
        """See `Endpoint.health`; ready if the server answers and lists the model. Raises nothing: `problem` says what is wrong."""
        try:
            window = await self.probe()
        except JaxrlError as error:
            return EndpointHealth(is_ready=False, version=NO_VERSION, problem=str(error))
        detail = {} if window is None else {"window": float(window)}
        return EndpointHealth(is_ready=True, version=NO_VERSION, detail=detail)

    async def probe(self) -> int | None:
        """Ask once whether the server is well and serves the model.

        Returns:
          Prompt plus completion tokens of one sequence; None if the server does not say.

        Raises:
          EndpointDownError: it cannot be reached, or says that it is not ready.
          EngineError: it does not serve the model, or refuses the key.
        """
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                health = await self._get(f"{self._root}/health")
                # A proxy or another kind of server may have no such route.
                if health.status_code in (401, 403):
                    raise await self._refusal("its health", health)
                if health.status_code >= 400 and health.status_code not in (404, 405):
                    raise EndpointDownError(f"{self._where} is not well: status {health.status_code}: {self._problem(health)}")
                return await self._look_up_model()
        except TimeoutError as error:
            raise EndpointDownError(f"{self._where} did not say how it is within {PROBE_DEADLINE_S:g} s") from error

    async def close(self) -> None:
        """See `Endpoint.close`."""
        await self._client.aclose()

    async def _ask(
        self, what: str, body: Callable[[str], dict[str, Any]], read: Callable[[bytes, str], T], *, path: str | None = None
    ) -> T:
        """Send a request within the deadline of a call, and read the answer in a worker thread.

        `path` None takes the route of tokens that the server has.
        """

        async def ask(failures: list[str], until: float) -> T:
            found = path or await self._route(what, failures, until)
            response = await self._post(what, found, body(found), failures, until)
            return await self._read(what, response, lambda content: read(content, found))

        return await self._within_deadline(what, ask)

    async def _ask_tokenizer(self, what: str, path: str, body: dict[str, Any], read: Callable[[bytes], T]) -> T | None:
        """Send a request to a route that a server may lack, as `_ask` does; None if it lacks it."""

        async def ask(failures: list[str], until: float) -> T | None:
            response = await self._post(what, path, body, failures, until)
            if response.status_code in _NO_ROUTE_STATUSES:
                await self._look_up_model()  # raises if the reason is the model or the key
                return None
            return await self._read(what, response, read)

        return await self._within_deadline(what, ask)

    async def _read(self, what: str, response: httpx.Response, read: Callable[[bytes], T]) -> T:
        """Read an answer in a worker thread; raise what it means if it is a refusal."""
        if response.status_code != 200:
            raise await self._refusal(what, response)
        try:
            return await asyncio.to_thread(read, response.content)
        except EngineError as error:
            raise EngineError(f"{self._where}: {what}: {self._without_key(str(error))}") from None

    async def _within_deadline(self, what: str, ask: Callable[[list[str], float], Awaitable[T]]) -> T:
        """Await `ask(failures, until)`, arguments as those of `_post`, within the deadline of a call."""
        timer = asyncio.timeout(self._timeout_s)
        failures: list[str] = []
        try:
            async with timer:
                return await ask(failures, timer.when() or 0.0)
        except TimeoutError as error:
            if not timer.expired():
                raise
            last = f"; the last try ended with {failures[-1]}" if failures else ""
            raise DeadlineError(f"{self._where}: {what} got no answer within {self._timeout_s:g} s (`timeout_s`){last}") from error

    async def _route(self, what: str, failures: list[str], until: float) -> str:
        """Return the route that the server has, found out by an empty request, which one that has it refuses as incomplete.

        Calls that begin before the first answer each ask: waiting for one another, they would also wait out each other's tries.
        """
        if self._path is None:
            response = await self._post(what, wire.TOKENS_PATH, {}, failures, until)
            if response.status_code == 401:
                raise await self._refusal(what, response)
            is_missing = response.status_code in _NO_ROUTE_STATUSES
            self._path = wire.COMPLETIONS_PATH if is_missing else wire.TOKENS_PATH
        return self._path

    async def _post(self, what: str, path: str, body: dict[str, Any], failures: list[str], until: float) -> httpx.Response:
        """Send until there is an answer that is final.

        Args:
          what: names the call.
          path: below the server's root.
          body: sent as JSON.
          failures: each try that failed is added in words.
          until: when the call's deadline is, on the loop's clock; no pause is begun that would outlast it.
        """
        for num_tries in range(1, self._max_attempts + 1):
            asked_s = None
            try:
                response = await self._send("POST", self._root + path, json=body)
            except LOST_CONNECTIONS as error:
                failures.append(headline(error))
            except httpx.HTTPError as error:
                raise EngineError(f"{self._where}: {what} failed with {headline(error)}") from error
            else:
                if response.status_code not in BUSY_STATUSES:
                    return response
                asked_s = retry_after_s(response.headers.get("retry-after"))
                failures.append(f"status {response.status_code}: {self._problem(response)}")
            pause_s = self._backoff.wait_s(num_tries, asked_s)
            if num_tries == self._max_attempts or asyncio.get_running_loop().time() + pause_s >= until:
                break
            await asyncio.sleep(pause_s)
        raise EndpointDownError(f"{self._where}: {what} failed {len(failures)} times, the last time with {failures[-1]}")

    async def _send(self, method: str, url: str, **content: Any) -> httpx.Response:
        """Send once, and read the answer as far as `MAX_ANSWER_BYTES`, counted after decompression."""
        async with self._client.stream(method, url, **content) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise EngineError(f"{self._where}: {method} {url} answered with more than {MAX_ANSWER_BYTES} bytes; it is not read on")
        # The body is decoded already, so the headers that tell how must not stay.
        headers = {name: response.headers[name] for name in ("location", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)

    async def _get(self, url: str) -> httpx.Response:
        try:
            return await self._send("GET", url)
        except httpx.HTTPError as error:
            raise EndpointDownError(f"{self._where} cannot be reached: {headline(error)}") from error

    async def _look_up_model(self) -> int | None:
        response = await self._get(f"{self.base_url}/models")
        if response.status_code in BUSY_STATUSES:
            raise EndpointDownError(f"{self._where} is not ready: {self._problem(response)}")
        if response.status_code != 200:
            raise await self._refusal("the list of models", response)
        try:
            served = wire.read_models(response.content)
        except EngineError as error:
            raise EngineError(f"{self._where}: {error}") from None
        if self.model not in served:
            raise EngineError(f"{self.base_url} does not serve {self.model!r}; it serves {', '.join(map(repr, served)) or 'nothing'}")
        self._window = served[self.model]
        return self._window

    async def _refusal(self, what: str, response: httpx.Response) -> EngineError:
        """Return the error that a final answer other than 200 means."""
        status, where = response.status_code, f"{self._where}: {what}"
        if status in (401, 403):
            if self._api_key is None:
                return EngineError(f"{where}: the server wants a key (status {status}); name the variable that holds it in `api_key_var`")
            source = f"in the environment variable {self._api_key_var}" if self._api_key_var else "that was given"
            return EngineError(f"{where}: the server refused the key {source} (status {status}); check it")
        problem = self._problem(response)
        if status == 404:
            await self._look_up_model()  # raises if the reason is the model
            return EngineError(f"{where}: status 404 from {response.url.path}, though the model is served: {problem}")
        if response.has_redirect_location:
            target = self._without_key(response.headers["location"])
            return EngineError(f"{where}: status {status}: it redirects to {target!r:.200}, and none is followed; correct `base_url`")
        if status in (400, 413, 422) and _TOO_LONG.search(problem):
            return PromptTooLongError(f"{where}: {problem}")
        return EngineError(f"{where}: status {status}: {problem}")

    def _problem(self, response: httpx.Response) -> str:
        return self._without_key(wire.read_problem(response.content))

    def _without_key(self, said: str) -> str:
        """Return what a server said, without the key, which it may repeat anywhere."""
        return redact(said.replace(self._api_key, "<redacted>") if self._api_key else said)

    def _within_window(self, request: GenerateRequest, what: str) -> GenerateRequest:
        if self._window is None:
            return request
        room = self._window - len(request.token_ids)
        if room < 1:
            num_tokens = len(request.token_ids)
            raise PromptTooLongError(f"{self._where}: {what}: {num_tokens} prompt tokens leave no room in a window of {self._window}")
        sampling = request.sampling
        if sampling.max_tokens <= room:
            return request
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=room))
