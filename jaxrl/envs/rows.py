"""Rows of a JSONL file of tasks: one JSON object a line, each refused with its line if it is not that.

In: a path. Out: the objects with the lines that they come from. What the objects mean, the environment that reads them knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.errors import ConfigError


class Row(NamedTuple):
    """One line that is not blank."""

    number: int
    """Of the line, from 1."""
    line: str
    """As it stands in the file."""
    value: dict[str, Any]
    """What it says; every number is finite, every text is Unicode."""


def read_rows(path: str, where: str, example: str) -> Iterator[Row]:
    """Yield the rows of a file; blank lines are none.

    Args:
      path: the file, in UTF-8.
      where: the environment and its setting, for messages.
      example: a line as it should be, for messages.

    Raises:
      ConfigError: the file cannot be read, or a line is no JSON object, or holds what JSON and Unicode do not.
    """
    try:
        # Python's text files break lines at line ends alone, unlike `str.splitlines`, which also would inside of texts.
        with Path(path).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(number, line, _value(line, f"{where}, line {number}", example))
    except FileNotFoundError:
        hint = "" if Path(path).is_absolute() else f"; paths are seen from where the run is started, which is {str(Path.cwd())!r}"
        raise ConfigError(f"{where}: there is no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read the file: {error}; it must be text in UTF-8, one JSON object a line") from error


def shown(value: Any) -> str:
    """Return a value and its type, for messages."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _value(line: str, where: str, example: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); expected one object a line, such as {example}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {shown(row)}")
    for key, value in row.items():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: what is under {key!r} is no Unicode text: {error}") from error
    return row


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _finite(word: str) -> float:
    if math.isinf(number := float(word)):
        raise ValueError(f"{word} is larger than any number that can be kept")
    return number
