"""The check of external servers, against one that runs in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxrl.doctor.endpoint import check_endpoint
from jaxrl.doctor.finding import Finding, Level
from jaxrl.errors import ConfigError
from tests.doctor.patients import MODEL, examine
from tests.inference.wire_server import FakeModel, WireServer


@contextmanager
def running(model: FakeModel) -> Iterator[WireServer]:
    """Run a server in a loop of its own: the check has one too."""
    server, loop, ready, done = WireServer(model), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield server
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    loop.close()


@pytest.mark.filterwarnings("ignore:`orchestrator.model.client` is not used:UserWarning")
def look(url: str, *more: str) -> Finding:
    return examine(check_endpoint, f"--orchestrator.model.client.base_url.0={url}", *more)


@pytest.mark.filterwarnings("ignore:`orchestrator.model.client` is not used:UserWarning")
def test_a_server_that_serves_the_model_is_good_and_one_that_serves_another_or_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeModel(models=(str(MODEL),), key="sesame")) as server:
        monkeypatch.setenv("SERVER_KEY", "sesame")
        key = "--orchestrator.model.client.api_key_var=SERVER_KEY"
        good = look(server.base_url, key)
        assert good.level is Level.GOOD and "1 of 1 are well and serve" in good.text and "window 64" in good.text
        assert "wants a key" in look(server.base_url).text
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(ConfigError, match="SERVER_KEY"):
            look(server.base_url, key)
    with running(FakeModel(models=("another",))) as server:
        other = look(server.base_url)
        assert other.level is Level.BAD and "it serves 'another'" in other.text
    gone = look(server.base_url)
    assert gone.level is Level.BAD and "cannot be reached" in gone.text and "start the server" in gone.text
