"""The rows of an evaluation while it is made: in plan order, and on disk as soon as an episode is over.

In: rows in the order in which episodes end. Out: all rows in plan order and, in a folder, `plan.json`, `episodes.jsonl` (plan order, only
ever grown at its end), `episodes.partial.jsonl` (what ended before its turn; gone when all is done) and `timings.jsonl`. A folder that
was left halfway is read again, so that nothing is played twice. It plays nothing and scores nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxrl.errors import ConfigError, RunFailedError
from jaxrl.evals.episodes import is_worth_replaying
from jaxrl.evals.plan import first_difference
from jaxrl.monitors.folder import only_writer
from jaxrl.monitors.jsonl import object_to_json, read_lines

logger = logging.getLogger(__name__)

PLAN, EPISODES, PARTIAL, TIMINGS, RESULT = "plan.json", "episodes.jsonl", "episodes.partial.jsonl", "timings.jsonl", "result.json"
_NEEDED = {"episode_id", "task_id", "sample", "status", "error", "reward", "completion_tokens", "is_truncated", "version", "token_versions"}
"""What a row must have to be taken over: scores are computed of these."""


class EpisodeBook:
    """The rows of one evaluation. `put` is for the event loop, the rest for worker threads.

    Args:
      episode_ids: of the plan, in its order.
      directory: where the files are kept; None keeps the rows in memory only.
    """

    def __init__(self, episode_ids: Sequence[str], directory: Path | None = None) -> None:
        self._positions = {episode_id: position for position, episode_id in enumerate(episode_ids)}
        self._rows: list[dict[str, Any] | None] = [None] * len(episode_ids)
        self._directory = directory
        self._lock = threading.Lock()
        self._new: deque[tuple[int, dict[str, Any], Mapping[str, Any]]] = deque()
        """Rows that are not on disk, with their places and timings."""
        self._early: dict[int, dict[str, Any]] = {}
        """Rows that wait for an earlier one; they are in the partial file."""
        self._num_written = 0
        """Rows of the plan that `episodes.jsonl` begins with."""
        self._files: dict[str, TextIO] = {}
        self._open = contextlib.ExitStack()

    def open(self, record: Mapping[str, Any], *, resume: bool) -> None:
        """Take over what the folder holds of this evaluation, and go on from there.

        Args:
          record: what the evaluation is (`plan_record`).
          resume: False moves what is there to files ending in `.bak1`, `.bak2` and so on, and begins anew.

        Raises:
          ConfigError: the folder holds another evaluation, or a row that cannot be read; or another process writes into it, or it cannot
            be written.
        """
        directory = self._directory
        if directory is None:
            return
        with self._lock:
            try:
                self._open.enter_context(only_writer(directory))
            except ConfigError as error:
                raise ConfigError(
                    f"an evaluation cannot be written into `{directory}`: another process is writing there, or it is no folder that can "
                    "be written; choose another one"
                ) from error
            try:
                if not resume:
                    _set_aside(directory)
                self._require_same(directory, record)
                self._read(directory)
                self._begin(directory)
            except OSError as error:
                raise ConfigError(f"`{directory}` cannot be used ({error}); choose another folder") from error

    def missing(self) -> list[int]:
        """Return the places of the plan that have no row."""
        return [position for position, row in enumerate(self._rows) if row is None]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that there are, in plan order."""
        return [row for row in self._rows if row is not None]

    def put(self, position: int, row: dict[str, Any], timing: Mapping[str, Any]) -> None:
        """Take the row of an episode that is over, and how long it took; `flush` writes it."""
        self._rows[position] = row
        self._new.append((position, row, timing))

    def flush(self) -> None:
        """Write what was put.

        Raises:
          RunFailedError: it cannot be written; what was written before stays.
        """
        if self._directory is None:
            return
        with self._lock:
            if not self._files:
                return
            try:
                while self._new:
                    self._write(*self._new.popleft())
                for file in self._files.values():
                    file.flush()
            except OSError as error:
                self._let_go()  # what is half written stays last, so that it can be told from a damaged line
                raise RunFailedError(
                    f"`{self._directory}` cannot be written any more ({error}); the episodes written so far are kept: make room, and start "
                    "the same evaluation again to go on"
                ) from error

    def close(self) -> None:
        """Write what was put, and let the folder go; a second call does nothing. Without a missing row the partial file goes away."""
        try:
            self.flush()
        except RunFailedError as error:
            logger.warning("%s", error)
        with self._lock, self._open:
            is_whole = bool(self._files) and self._num_written == len(self._rows)
            if self._let_go() and is_whole and self._directory is not None:
                (self._directory / PARTIAL).unlink(missing_ok=True)

    def _let_go(self) -> bool:
        """Close the files, and write nothing more; say whether all of them could be closed."""
        files, self._files = self._files, {}
        is_closed = True
        for file in files.values():
            try:
                file.close()
            except OSError:
                is_closed = False
        return is_closed

    def _write(self, position: int, row: dict[str, Any], timing: Mapping[str, Any]) -> None:
        self._files[TIMINGS].write(object_to_json(timing) + "\n")
        self._early[position] = row
        if position != self._num_written:
            self._files[PARTIAL].write(object_to_json(row) + "\n")
        while self._num_written in self._early:
            self._files[EPISODES].write(object_to_json(self._early.pop(self._num_written)) + "\n")
            self._num_written += 1

    def _require_same(self, directory: Path, record: Mapping[str, Any]) -> None:
        """Refuse a folder of another evaluation, and leave in it what this one is."""
        path = directory / PLAN
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"`{path}` is damaged ({error}); begin anew with `resume=False` (`--no-resume`)") from None
            if difference := first_difference(_without_hash(before), _without_hash(record)):
                raise ConfigError(
                    f"`{directory}` holds another evaluation: {difference}; choose another folder, or begin anew with `resume=False` "
                    "(`--no-resume`), which keeps the old files under another name"
                )
        elif any((directory / name).exists() for name in (EPISODES, PARTIAL)):
            raise ConfigError(
                f"`{directory}` has episodes but no `{PLAN}` that says what they are of; choose another folder, or begin anew with "
                "`resume=False` (`--no-resume`)"
            )
        text = json.dumps(record, indent=1, ensure_ascii=True) + "\n"
        _replace(path, [text])

    def _read(self, directory: Path) -> None:
        """Take over the rows that stand."""
        replayed: set[int] = set()
        for name in (EPISODES, PARTIAL):
            path = directory / name
            try:
                found = read_lines(path)
            except ValueError as error:
                raise ConfigError(f"{error}; mend the line or begin anew with `resume=False` (`--no-resume`)") from None
            for number, row in enumerate(found, start=1):
                position = self._positions.get(row["episode_id"]) if _is_row(row) else None
                if position is None:
                    raise ConfigError(
                        f"`{path}`, line {number}: not an episode of this evaluation; mend the line or begin anew with `resume=False` "
                        "(`--no-resume`)"
                    )
                if is_worth_replaying(row):
                    replayed.add(position)
                else:
                    self._rows[position] = row
        num_kept = len(self.rows())
        if num_kept or replayed:
            logger.info(
                "`%s`: %d of %d episodes are there already; %d that failed for want of an answer, of time or of a server are played again",
                directory, num_kept, len(self._rows), len(replayed),
            )  # fmt: skip

    def _begin(self, directory: Path) -> None:
        """Write the files anew with the rows that stand, and open them at their ends.

        First what ended before its turn: a crash in between leaves rows twice, and loses none.
        """
        self._num_written = next(iter(self.missing()), len(self._rows))
        if self.missing():
            (directory / RESULT).unlink(missing_ok=True)
        self._early = {place: row for place, row in enumerate(self._rows) if place > self._num_written and row is not None}
        _replace(directory / PARTIAL, (object_to_json(row) + "\n" for row in self._early.values()))
        _replace(directory / EPISODES, (object_to_json(row) + "\n" for row in self._rows[: self._num_written] if row is not None))
        with contextlib.suppress(ValueError):  # a damaged line of it is nobody's loss; a torn one would spoil the next
            _replace(directory / TIMINGS, [object_to_json(timing) + "\n" for timing in read_lines(directory / TIMINGS)])
        for name in (EPISODES, PARTIAL, TIMINGS):
            self._files[name] = (directory / name).open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def read_episodes(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a finished evaluation, in plan order.

    Raises:
      ConfigError: a line is damaged.
    """
    try:
        return read_lines(directory / EPISODES)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _is_row(row: Any) -> bool:
    """Say whether a line that was read is a whole row."""
    if not isinstance(row, Mapping) or not set(row) >= _NEEDED:
        return False
    error = row["error"]
    return isinstance(row["episode_id"], str) and (error is None or (isinstance(error, Mapping) and {"stage", "type"} <= set(error)))


def _set_aside(directory: Path) -> None:
    """Rename the files of an earlier evaluation, all with one number."""
    names = [name for name in (PLAN, EPISODES, PARTIAL, TIMINGS, RESULT) if (directory / name).exists()]
    number = 1
    while any(directory.glob(f"*.bak{number}")):
        number += 1
    for name in names:
        (directory / name).rename(directory / f"{name}.bak{number}")


def _without_hash(record: Any) -> Any:
    return {key: value for key, value in record.items() if key != "sha"} if isinstance(record, Mapping) else record


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Write a file in one move, so that a crash leaves the old or the new one."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.writelines(lines)
    new.replace(path)
