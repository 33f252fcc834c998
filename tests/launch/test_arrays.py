"""`jaxrl.launch.arrays`: what is shown and logged while programs compile."""

import logging

import pytest

from jaxrl.launch.arrays import _compiling


def test_a_program_is_shown_when_it_begins_and_logged_with_its_seconds_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []

    class Records(logging.Handler):
        """Keeps log lines among what is shown."""

        def emit(self, record: logging.LogRecord) -> None:
            """Keep one without its seconds."""
            events.append(record.getMessage().split(" in ")[0])

    logger, handler = logging.getLogger("jaxrl.launch.arrays"), Records()
    logger.addHandler(handler)
    try:
        with (
            caplog.at_level(logging.INFO, logger.name),
            _compiling(lambda phase, done, total, detail="": events.append(f"{phase} {done}/{total} {detail}"), 3) as begin,
        ):
            for before, name, done, total in ((0, "grad_step", 0, 2), (0, "apply", 1, 2), (2, "decode", 0, 1)):
                begin(before, name, done, total)
    finally:
        logger.removeHandler(handler)
    assert events == [
        "compiling 0/3 grad_step",
        "compiled grad_step",
        "compiling 1/3 apply",
        "compiled apply",
        "compiling 2/3 decode",
        "compiled decode",
        "compiling 3/3 ",
    ]
