"""Rows of files of tasks, JSONL (one JSON object a line) or Parquet, each refused with its place if it is not what JSON can hold.

In: a path, or a pattern of paths. Out: the rows as objects, with the places that they come from. What they mean, the environment that reads
them knows. The package that reads Parquet is imported only for such a file.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.errors import ConfigError

BATCH_ROWS = 1024
"""Rows of a Parquet file that are in memory at a time."""


class Row(NamedTuple):
    """One line of a JSONL file that is not blank, or one row of a Parquet file."""

    number: int
    """Of the line or row, from 1."""
    line: str
    """As it stands in the file; a row of Parquet as JSON."""
    value: dict[str, Any]
    """What it says; every number is finite, every text is Unicode."""


class Place(NamedTuple):
    """Where a row stands."""

    file: str
    """The file, if there are several; else empty."""
    unit: str
    """`line` or `row`."""
    number: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" if self.file else f"{self.unit} {self.number}"

    def and_also(self, other: Place) -> str:
        """Return this place and another one in words."""
        return f"{self.unit}s {self.number} and {other.number}" if self.file == other.file == "" else f"{self} and {other}"


def read_files(path: str, where: str, example: str) -> Iterator[tuple[Place, Row]]:
    """Yield the rows of a file, or of all files that a pattern matches, in the order of their names.

    Args:
      path: a file, in Parquet if its name ends in `.parquet` and else JSONL; where there is no such file, a pattern with `*`, `?` or `[`.
      where: the environment and its setting, for messages.
      example: a row as it should be, for messages.

    Raises:
      ConfigError: the pattern matches no file, or see `read_rows` and `read_parquet`.
    """
    is_pattern = not Path(path).exists() and glob.has_magic(path)
    files = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file()) if is_pattern else [path]
    if not files:
        raise ConfigError(f"{where}: no file matches it{_seen_from(path)}")
    for file in files:
        told = f"{where}, {file}" if is_pattern else where
        is_parquet = file.lower().endswith(".parquet")
        for row in read_parquet(file, told) if is_parquet else read_rows(file, told, example):
            yield Place(file if is_pattern else "", "row" if is_parquet else "line", row.number), row


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
        raise ConfigError(f"{where}: there is no such file{_seen_from(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot read the file: {error}; it must be text in UTF-8, one JSON object a line") from error


def read_parquet(path: str, where: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file as the JSON objects that they are; a column that is null in a row is not in that row.

    Args:
      path: the file.
      where: the environment and its setting, for messages.

    Raises:
      ConfigError: `pyarrow` is missing, the file cannot be read, two columns have one name, or a row holds what JSON does not: NaN, bytes,
        a date.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            f"{where}: a Parquet file needs the package `pyarrow`, which cannot be imported ({error}); install it with "
            "`pip install 'jaxrl[parquet]'`"
        ) from error
    number = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ConfigError(f"{where}: two columns have one name; the columns are {', '.join(map(repr, names))}")
            for batch in file.iter_batches(BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield _row_of_parquet(number, value, f"{where}, row {number}")
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no such file{_seen_from(path)}") from None
    except (OSError, UnicodeDecodeError, ArrowException) as error:
        raise ConfigError(f"{where}: cannot read the file: {error}; its name ends in .parquet, so it must be Parquet") from error


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


def _row_of_parquet(number: int, value: dict[str, Any], where: str) -> Row:
    there = {key: cell for key, cell in value.items() if cell is not None}
    for key, cell in there.items():
        try:
            json.dumps(cell, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: what is under {key!r} has no place in JSON: {error}; write it as text, or leave it out") from None
    line = json.dumps(there, ensure_ascii=False)
    return Row(number, line, _value(line, where, ""))


def _seen_from(path: str) -> str:
    return "" if Path(path).is_absolute() else f"; paths are seen from where the run is started, which is {str(Path.cwd())!r}"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _finite(word: str) -> float:
    if math.isinf(number := float(word)):
        raise ValueError(f"{word} is larger than any number that can be kept")
    return number
