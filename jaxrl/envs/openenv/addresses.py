"""Where an OpenEnv server is: one address for its tasks (HTTP), another for its episodes (WebSocket).

In: either of them, as a user writes it. Out: both, and whether the server is on this machine.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit, urlunsplit

_HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_EXPECTED = "expected the address of an OpenEnv server, such as 'http://127.0.0.1:8000'"


def http_url(url: str) -> str:
    """Return the address of a server's HTTP routes, with no `/` at its end.

    Raises:
      ValueError: it is no address of a server.

    Example:
      >>> http_url("wss://example.com/games/ws?session_id=7"), http_url("http://127.0.0.1:8000/")
      ('https://example.com/games', 'http://127.0.0.1:8000')
    """
    try:
        parts = urlsplit(url)
        problem = None if parts.port != 0 else "port 0 is none"
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}, got {url!r}: {error}") from None
    if parts.scheme not in _HTTP or not parts.hostname or problem:
        raise ValueError(f"{_EXPECTED}, got {url!r}" + (f": {problem}" if problem else ""))
    path = parts.path.rstrip("/").removesuffix("/ws").rstrip("/")
    return urlunsplit((_HTTP[parts.scheme], parts.netloc, path, "", ""))


def ws_url(url: str) -> str:
    """Return the address at which a server's episodes are played.

    Raises:
      ValueError: it is no address of a server.

    Example:
      >>> ws_url("https://example.com/games/"), ws_url("ws://127.0.0.1:8000/ws")
      ('wss://example.com/games/ws', 'ws://127.0.0.1:8000/ws')
    """
    return "ws" + http_url(url).removeprefix("http") + "/ws"


def shown_url(url: str) -> str:
    """Return an address for messages, which others may read: without the name and the password that it may hold.

    Example:
      >>> shown_url("https://me:secret@example.com:8000/games"), shown_url("http://[::1]:80/ws")
      ('https://example.com:8000/games', 'http://[::1]:80/ws')
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_loopback(url: str) -> bool:
    """Say whether a server is on this machine, where no proxy reaches it.

    Example:
      >>> [is_loopback(url) for url in ("http://localhost:8000", "ws://127.0.0.2/ws", "http://[::1]:8000", "http://0.0.0.0:8000")]
      [True, True, True, True]
      >>> is_loopback("http://example.com")
      False
    """
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified  # a server that listens everywhere is called so, too
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
