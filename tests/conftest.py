"""Strict tests: eight simulated CPU devices, no implicit rank promotion, loopback sockets only."""

import os
import socket

from tests.flags import EIGHT_DEVICES, FAST_COMPILATION

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES} {FAST_COMPILATION}".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# No test reads programs that another one compiled, or leaves any behind; the tests of the compile cache switch it on for themselves.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

_connect = socket.socket.connect


def _connect_to_loopback_only(self: socket.socket, address: object) -> None:
    host = address[0] if isinstance(address, tuple) else "unix"
    if host not in ("127.0.0.1", "::1", "localhost", "unix"):
        raise OSError(f"tests may connect to loopback only, not to {host!r}")
    _connect(self, address)


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _connect_to_loopback_only)
