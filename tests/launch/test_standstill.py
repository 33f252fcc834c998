"""`jaxrl.launch.standstill`: an event loop that no longer ticks says once where it stands."""

import asyncio
import logging
import threading
import time

import pytest

from jaxrl.launch.side_by_side import in_thread, side_by_side
from jaxrl.launch.standstill import StandstillWatch


class Said(logging.Handler):
    """Keeps what was logged, and lets a blocked call go on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.heard.set()


@pytest.fixture
def said():
    handler = Said()
    logger = logging.getLogger("jaxrl.launch.standstill")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def an_agent_that_blocks(said: Said) -> None:
    assert said.heard.wait(30)  # inside of the standard library, as a client that waits for its socket is


async def test_a_loop_that_stands_still_says_where_and_what_to_do(said: Said):
    line = an_agent_that_blocks.__code__.co_firstlineno + 1
    with StandstillWatch(limit_s=0.1):
        await an_agent_that_blocks(said)
    (text,) = said.lines
    assert "stood still for 0.1 s" in text
    assert f"it is in {__file__}, line {line}, `an_agent_that_blocks` (down in " in text
    assert "threading.py" in text and "async client" in text and "plain `def`" in text


async def test_a_second_standstill_is_not_said_again(said: Said):
    with StandstillWatch(limit_s=0.1):
        await an_agent_that_blocks(said)
        await asyncio.sleep(0.05)
        time.sleep(0.3)
    assert len(said.lines) == 1


async def test_a_loop_that_ticks_is_left_alone_and_the_thread_ends(said: Said):
    def is_watched() -> bool:
        return "standstill watch" in [thread.name for thread in threading.enumerate()]

    with StandstillWatch(limit_s=10.0):
        assert is_watched()
        await asyncio.sleep(0.01)
    assert said.lines == [] and not is_watched()


async def test_a_run_is_watched(said: Said):
    await side_by_side(an_agent_that_blocks(said), in_thread(lambda: None, "trainer"), standstill_s=0.1)
    assert "`an_agent_that_blocks`" in said.lines[0]
