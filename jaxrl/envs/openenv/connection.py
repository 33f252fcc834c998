"""One episode on an OpenEnv server: a WebSocket, JSON frames, one answer for each request.

In: the server's address, what to reset with, actions. Out: observations. Each connection has an environment of its own on the server, which
goes with it; the server's HTTP routes `/reset` and `/step` make a new one for each request, and are not used. What the environment raises
leaves the connection as it was. A connection that was late, or that said something that is no answer, is not used again.

| what waits | for what                                    | ends by                                  |
|------------|---------------------------------------------|------------------------------------------|
| `open`     | the connection                              | `deadline_s`                             |
| a request  | its answer                                  | `deadline_s`                             |
| `close`    | the server to give the environment back     | `CLOSE_DEADLINE_S`, then it is cut off   |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxrl.blame import headline
from jaxrl.envs.openenv.addresses import is_loopback, shown_url, ws_url
from jaxrl.errors import ConfigError, EnvError, EnvUnreachableError
from jaxrl.inference.rendering.messages import whole_characters

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_FRAME_BYTES = 100 * 2**20
"""What OpenEnv's own client takes."""
CLOSE_DEADLINE_S = 2.0
PING_INTERVAL_S = 20.0
"""Keeps the connection from looking idle to what is between, while the policy writes."""
MAX_MESSAGE_CHARS = 2000
"""How much of a server's own words is repeated: an environment may raise all that it knows."""


class RefusedError(EnvError):
    """The server answered a request with an error.

    Args:
      code: the server's word for it, such as `EXECUTION_ERROR`.
      message: what went wrong, in words.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CapacityReachedError(RefusedError):
    """The server has as many sessions as it may have."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says after a reset or a step."""

    observation: dict[str, Any]
    """Its fields, without `metadata`."""
    reward: float | None
    """None if it gave none, which is no 0."""
    done: bool
    """True if the episode is over; the server would take further steps all the same."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What else it tells."""


def finite_number(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else of JSON; a bool is none.

    Example:
      >>> finite_number(3), finite_number("3"), finite_number(True), finite_number(float("nan")), finite_number(10**400)
      (3.0, None, None, None, None)
    """
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def require_websockets() -> None:
    """Raise a ConfigError if the package is not installed."""
    try:
        import websockets.asyncio.client  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"episodes of an OpenEnv server need the package `websockets` (pip install 'jaxrl[openenv]'): {error}") from error


class Connection:
    """One WebSocket, and the environment at its other end. One request at a time."""

    def __init__(self, socket: ClientConnection, url: str, deadline_s: float) -> None:
        self._socket = socket
        self._url = shown_url(url)
        self._deadline_s = deadline_s
        self._broken: str | None = None

    @classmethod
    async def open(cls, base_url: str, *, deadline_s: float) -> Connection:
        """Connect; whether the server has room is said by its first answer.

        Args:
          base_url: the server.
          deadline_s: for connecting, and for the answer to each request.

        Raises:
          EnvUnreachableError: nobody answers there, or not in time.
          ConfigError: `websockets` is not installed.
        """
        require_websockets()
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = ws_url(base_url)
        try:
            socket = await connect(
                url,
                max_size=MAX_FRAME_BYTES,
                open_timeout=deadline_s,
                close_timeout=CLOSE_DEADLINE_S,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=None,  # an environment that computes answers no ping; requests have their own deadline
                compression=None if is_loopback(url) else "deflate",
                proxy=None if is_loopback(url) else True,
            )
        except (OSError, TimeoutError, WebSocketException, ImportError) as error:  # a proxy may need a package
            raise EnvUnreachableError(
                f"{shown_url(url)}: no session can be opened: {headline(error)}; is the server running there?"
            ) from error
        return cls(socket, url, deadline_s)

    async def reset(self, data: Mapping[str, Any]) -> Observation:
        """Begin an episode.

        Args:
          data: what the environment's `reset` takes, such as `split`, `index` and `seed`; it drops what it does not know.

        Raises:
          CapacityReachedError: the server has no room; the connection is of no use.
          RefusedError: the server answered with an error.
          EnvError: it was late, went away, or said something that is no observation.
        """
        return await self._ask("reset", data)

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Take an action; raises what `reset` raises."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """Let the environment go, and wait until the server has; never raises, and may be called twice."""
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                if self._broken is None:
                    await self._socket.send('{"type": "close"}')
                    await self._socket.wait_closed()  # only then is the place free
                else:
                    await self._socket.close()
        except (OSError, TimeoutError, WebSocketException):
            pass
        finally:
            self._broken = self._broken or "it was closed"
            self._socket.transport.abort()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observation:
        """Send one request and return its answer."""
        if self._broken is not None:
            raise EnvError(f"{self._url}: the session cannot be used any more: {self._broken}")
        frame = json.dumps({"type": kind, "data": data}, allow_nan=False)
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._exchange(frame)
        except TimeoutError:
            raise self._break(f"`{kind}` was not answered in {self._deadline_s:g} s") from None
        except asyncio.CancelledError:
            self._broken = f"`{kind}` was cancelled before its answer came"
            raise
        return self._read(kind, answer)

    async def _exchange(self, frame: str) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):  # a server without room says so unasked, and closes; that can still be read
            await self._socket.send(frame)
        try:
            return await self._socket.recv()
        except ConnectionClosed as error:
            raise self._break(f"the server ended the session: {headline(error)}") from error

    def _read(self, kind: str, answer: str | bytes) -> Observation:
        """Return the observation of an answer, or raise the error that it is."""
        try:
            message = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._break(f"the answer to `{kind}` is no JSON: {answer[:200]!r}") from error
        match message:
            case {"type": "error", "data": dict() as data}:
                raise self._refusal(kind, data)
            case {"type": "observation", "data": {"observation": dict()} as data}:
                return self._observation(kind, data)
        raise self._break(f"the answer to `{kind}` is no observation: {answer[:200]!r}")

    def _refusal(self, kind: str, data: dict[str, Any]) -> RefusedError:
        code, message = (whole_characters(str(data.get(key))[:MAX_MESSAGE_CHARS]) for key in ("code", "message"))
        if code == "CAPACITY_REACHED":
            self._broken = message
            used = f"{data.get('active_sessions')} of {data.get('max_sessions')} sessions are in use"
            return CapacityReachedError(code, f"{self._url} has no room: {used} ({message})")
        if code in ("FACTORY_ERROR", "SESSION_ERROR"):
            self._broken = message
        details = f": {json.dumps(data['errors'])[:500]}" if "errors" in data else ""
        return RefusedError(code, f"{self._url}: `{kind}` was refused ({code}): {message}{details}")

    def _observation(self, kind: str, data: dict[str, Any]) -> Observation:
        fields = dict(data["observation"])
        told = [fields.pop("metadata", None) or {}, data.get("metadata") or {}]  # in either place, and both are the environment's
        reward, done = data.get("reward"), data.get("done", False)
        given = float(reward) if isinstance(reward, bool) else finite_number(reward)
        if reward is not None and given is None:
            raise self._break(f"the reward of `{kind}` must be a finite number or null, got {reward!r:.100}")
        if not isinstance(done, bool) or not all(isinstance(part, dict) for part in told):
            raise self._break(f"`done` of `{kind}` must be true or false and `metadata` an object, got {done!r:.100} and {told!r:.200}")
        return Observation(fields, given, done, told[0] | told[1])

    def _break(self, problem: str) -> EnvError:
        """Return the error of a connection that is not used again."""
        self._broken = problem
        return EnvError(f"{self._url}: {problem}")
