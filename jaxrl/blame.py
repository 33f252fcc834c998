"""Which part of a run an exception comes from: a name that is written on it where that part begins. And at which line it was raised.

In: a block or an exception, and the name of a component. Out: the same exception, named. A name is never guessed from a
traceback; what is done with it (`monitors.crash`) is not known here.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)

START_UP = "start-up"
"""The component of what fails before any part has begun."""

_COMPONENT = "_jaxrl_component"
_MAX_CAUSES = 8
_LIBRARIES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parent) + os.sep


def blame(error: Error, component: str) -> Error:
    """Name the component that an exception comes from; a name that it has already stays."""
    if not hasattr(error, _COMPONENT):
        with contextlib.suppress(Exception):  # an exception of a class that takes no attributes stays unnamed
            setattr(error, _COMPONENT, component)
    return error


@contextlib.contextmanager
def failing_in(component: str) -> Iterator[None]:
    """Name the component of whatever is raised in the block, unless a block inside has named it.

    Example:
      >>> with contextlib.suppress(ValueError), failing_in("orchestrator"), failing_in("environment 'sums'"):
      ...     error = ValueError("no tasks")
      ...     raise error
      >>> component_of_error(error)
      "environment 'sums'"
    """
    try:
        yield
    except BaseException as error:
        blame(error, component)
        raise


def component_of_error(error: BaseException) -> str:
    """Return the component that an exception comes from: the one named deepest in its chain of causes."""
    named = [getattr(part, _COMPONENT) for part in causes_of(error) if hasattr(part, _COMPONENT)]
    return named[-1] if named else START_UP


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an exception and what it was raised from, outermost first; of a group, the first of its exceptions."""
    chain: list[BaseException] = []
    part: BaseException | None = error
    # By identity: an exception may compare as it likes.
    while part is not None and not any(part is known for known in chain) and len(chain) < _MAX_CAUSES:
        chain.append(part)
        part = part.exceptions[0] if isinstance(part, BaseExceptionGroup) else part.__cause__
    return chain


def headline(error: BaseException) -> str:
    """Return an exception in words: its type, and what it says if it says anything.

    Example:
      >>> headline(ValueError("no tasks")), headline(TimeoutError())
      ('ValueError: no tasks', 'TimeoutError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def in_words(error: BaseException) -> str:
    """Return an exception in words, and where somebody's code raised it (`place_of`)."""
    place = place_of(error)
    return headline(error) + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """Return the file, line and function in which somebody's code raised an exception; empty if it was never raised.

    That is the innermost one that belongs to no library, nor to jaxrl; or else the innermost one of jaxrl.
    """
    frames = traceback.extract_tb(causes_of(error)[-1].__traceback__ if isinstance(error, BaseExceptionGroup) else error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)]
    theirs = [frame for frame in frames if frame not in ours and not frame.filename.startswith((*_LIBRARIES, "<"))]
    for frame in (theirs or ours)[-1:]:
        return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return ""
