"""Lines of JSON on disk: `metrics.jsonl`, which every run keeps, and the writer that the other logs share.

In: a step and its numbers. Out: one row per step, in step order, on disk as soon as the call returns. Numbers that come
late, such as the scores of an evaluation, are merged into their step's row. It keeps no rows in memory, and no view of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from jaxrl.errors import ConfigError

logger = logging.getLogger(__name__)

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that JSON allows as they are but that many readers take for the end of a line."""


def to_json(value: Any) -> str:
    """Return one line of JSON: arrays as lists, dataclasses as objects, non-finite numbers as null, all else as text."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


def object_to_json(value: Mapping[str, Any]) -> str:
    """Return one line of JSON, as `to_json` does; a value that cannot be written in any way costs its own key and no other.

    Lists can be nested more deeply than can be written, and a policy may say such.

    Example:
      >>> inside_itself = []
      >>> inside_itself.append(inside_itself)
      >>> object_to_json({"reward": 1.0, "said": inside_itself})
      '{"reward": 1.0, "said": "cannot be written: RecursionError"}'
    """
    try:
        return to_json(value)
    except Exception:
        return to_json({str(key): _writable(part) for key, part in value.items()})


def append_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append one line of JSON per object (`object_to_json`), making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lone surrogates, which UTF-8 cannot hold, become JSON's own escapes.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(object_to_json(value) + "\n" for value in values)


def append_compact_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append objects as `append_lines` does, without spaces, and much faster where a value is a JSON value already.

    What cannot be written in any way, such as a dict inside of itself, costs its own key of an object and no other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for value in values:
            try:
                line = msgspec.json.encode(value).decode().translate(_LINE_ENDS)
            except Exception:  # a lone surrogate, or what is no JSON value
                line = object_to_json(value)
            file.write(line + "\n")


def replace_compact_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines that `append_compact_lines` writes in place of a file, in one move: a crash leaves the old or the new lines."""
    new = _beside(path)
    new.unlink(missing_ok=True)
    append_compact_lines(new, values)
    os.replace(new, path)


def finite_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that a float can hold.

    Example:
      >>> finite_values({"loss": 1, "kl": math.nan, "huge": 10**400})
      {'loss': 1.0}
    """
    finite: dict[str, float] = {}
    for name, value in values.items():
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                finite[name] = float(value)
    return finite


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, leaving out a last line that a crash cut short; a file that is not there has none."""
    return list(iterate_lines(path)) if path.exists() else []


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `read_lines` returns, one line at a time.

    Raises:
      ValueError: a line before the last is no JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                if file.peek(1):
                    raise ValueError(f"`{path}`, line {number}: not JSON: {line[:80].decode(errors='replace').rstrip()!r}") from None
                logger.warning("`%s`: the last line is incomplete and is left out", path)
                return
            yield row


class MetricsFile:
    """`metrics.jsonl`. Thread-safe; used from worker threads."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open the file.

        Args:
          path: where; the folder is made.
          resume_step: None begins an empty file; a step keeps the rows up to it and drops the later ones, which the run
            will write again.

        Raises:
          ConfigError: the file cannot be written; a run does not start without its record.
        """
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resume_step is None else [row for row in read_lines(path) if row["step"] <= resume_step]
            self._rewrite(kept)
        except OSError as error:
            raise ConfigError(f"`{path}` cannot be written ({error}); choose another `run.output_dir`") from error
        self._last_step = kept[-1]["step"] if kept else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step; values that the step's row has already are replaced.

        Args:
          step: 1-based step; 0 is the base policy.
          values: numbers by metric name; those that are not finite are dropped with a warning.
        """
        finite = finite_values(values)
        dropped = sorted(set(values) - set(finite))
        if dropped:
            logger.warning("step %d: not finite and left out of %s: %s", step, self._path.name, ", ".join(dropped))
        with self._lock:
            if step > self._last_step and self._file is not None and self._path.exists():
                self._file.write(to_json({"step": step, **finite}) + "\n")
                self._last_step = step
                return
            rows = {row["step"]: row for row in read_lines(self._path)}
            rows[step] = {"step": step, **rows.get(step, {}), **finite}
            self._rewrite([rows[s] for s in sorted(rows)])
            self._last_step = max(rows)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file in one move, so that a crash leaves the old or the new rows."""
        new = _beside(self._path)
        new.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8", errors="backslashreplace")
        # Only now: a disk that is full must not leave a closed file, which would refuse every later row.
        if self._file is not None:
            self._file.close()
        os.replace(new, self._path)
        # A name may hold what UTF-8 cannot, as that of a kind of tasks does which a file of tasks has so.
        self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)


def _writable(value: Any) -> Any:
    """Return a value, or if no JSON can be made of it, a sentence that says so."""
    try:
        to_json(value)
    except Exception as error:
        return f"cannot be written: {type(error).__name__}"
    return value


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)
