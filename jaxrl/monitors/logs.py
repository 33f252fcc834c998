"""The logs of a run folder: `run.log` for people, `run.jsonl` for programs, `faults.txt` for what kills the process.

In: log records from INFO up, and the warnings of libraries. Out: bounded files in which nothing looks like a secret. What the terminal
shows is not decided here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from jaxrl.config.dump import redact
from jaxrl.errors import ConfigError
from jaxrl.monitors.jsonl import to_json

MAX_BYTES = 20 * 2**20
"""Size of a log file before it is rolled over."""

NUM_OLD_FILES = 3
"""Rolled-over files that are kept beside each log file."""

MAX_RECORD_CHARS = 100_000
"""Longest text of one record; what is beyond is left out, so that one record cannot fill a file."""

MAX_FAILED_THREADS = 20
"""Failed threads that are remembered; all of them are logged."""

_ASSIGNMENT = re.compile(
    r"(?i)(api[_-]?key|secret|passwd|password|token|credentials?|private[_-]?key|access[_-]?key|authorization)"
    r"(\\?['\"]?\s*[:=]\s*\\?['\"]?(?:basic\s+)?)([^\s'\"<>,;&(){}\[\]\\]{8,})"
)
"""`NAME=value` or `"name": "value"` inside a text, where the name ends like a secret's. It begins with a word and not with what may stand
before it, so a long text takes no longer than its length."""

_MIN_SECRET_CHARS = 8
"""A shorter value is too likely to be an ordinary word."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Characters that make a terminal do something when a log is shown on it; not the tab and the end of a line."""

_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Redactor:
    """Cuts secrets out of texts: what looks like one, what is named like one, and the values that it was told."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Remember the values; short ones are ignored."""
        known = sorted({s for s in secrets if len(s) >= _MIN_SECRET_CHARS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        """Return the text without secrets.

        Example:
          >>> Redactor(["correct horse"])("HF_TOKEN=abcdefgh1, sent correct horse, max_tokens=12345678")
          'HF_TOKEN=<redacted>, sent <redacted>, max_tokens=12345678'
        """
        if self._known is not None:
            text = self._known.sub("<redacted>", text)
        return redact(_ASSIGNMENT.sub(r"\1\2<redacted>", text))


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets."""
    return [value for name, value in environment.items() if redact({name: "x"})[name] != "x"]


@contextlib.contextmanager
def logging_to(folder: Path, redactor: Redactor | None = None) -> Iterator[RunLog]:
    """Send the package's records from INFO up, and everybody's from WARNING up, to the log files of a run.

    Raises:
      ConfigError: the files cannot be written.
    """
    log = RunLog(redactor or Redactor())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handlers = [_file_handler(folder / "run.log", _TextFormatter(log)), _file_handler(folder / "run.jsonl", _JsonFormatter(log))]
    except OSError as error:
        raise ConfigError(f"the logs of the run cannot be written to {folder}: {error}; choose another `run.output_dir`") from error
    root, own = logging.getLogger(), logging.getLogger("jaxrl")
    level = own.level
    own.setLevel(logging.INFO)
    for handler in handlers:
        handler.addFilter(_is_wanted)
        root.addHandler(handler)
    logging.captureWarnings(True)
    hook, threading.excepthook = threading.excepthook, log.thread_failed
    try:
        with _faults_to(folder / "faults.txt"):
            yield log
    finally:
        threading.excepthook = hook
        logging.captureWarnings(False)
        own.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class RunLog:
    """What the log files share: how secrets are cut, at which step the run is, which threads failed."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self.step: int | None = None
        """The step that was reported last; stands in each record of `run.jsonl`."""
        self.failed_threads: list[str] = []
        """One line for each of the first threads that ended with an exception that nobody handled."""

    def clean(self, text: str) -> str:
        r"""Return a text as it may stand in a file: without secrets and control characters, and not too long.

        Example:
          >>> RunLog(Redactor(["correct horse"])).clean("\x1b[1mcorrect horse\r")
          '\\x1b[1m<redacted>\\x0d'
        """
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", self.redactor(text))
        left_out = len(text) - MAX_RECORD_CHARS
        return text if left_out <= 0 else f"{text[:MAX_RECORD_CHARS]} ... and {left_out:,} more characters"

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """Log what ended a thread; `threading.excepthook` while the files are open."""
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = args.thread.name if args.thread is not None else "?"
        if len(self.failed_threads) < MAX_FAILED_THREADS:
            self.failed_threads.append(self.clean(f"thread {name!r}: {type(args.exc_value).__name__}: {text_of(args.exc_value)}"))
        logging.getLogger("jaxrl.threads").error("thread %r ended with an exception that nobody handled", name, exc_info=args.exc_value)


def text_of(error: BaseException) -> str:
    """Return an exception's message, also of one that fails when it is asked for it."""
    try:
        return str(error)
    except Exception:
        return "(it has no text)"


def component_of(logger_name: str) -> str:
    """Return which part of the system a logger belongs to.

    Example:
      >>> component_of("jaxrl.trainer.checkpoint"), component_of("py.warnings"), component_of("jax._src.x")
      ('trainer', 'warning', 'jax')
    """
    if logger_name == "py.warnings":
        return "warning"
    parts = logger_name.split(".")
    return parts[1] if parts[0] == "jaxrl" and len(parts) > 1 else parts[0]


class _TextFormatter(logging.Formatter):
    def __init__(self, log: RunLog) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        return self._log.clean(super().format(record))


class _JsonFormatter(logging.Formatter):
    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        clean = self._log.clean
        value: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": component_of(record.name),
            "message": clean(record.getMessage()),
            "step": getattr(record, "step", self._log.step),
            "logger": record.name,
            "thread": record.threadName,
        }
        if record.exc_info and record.exc_info[1] is not None:
            value["exception"] = clean("".join(traceback.format_exception(record.exc_info[1])))
        extra = {key: v for key, v in vars(record).items() if key not in _RECORD_FIELDS and key != "step"}
        if extra:
            # As JSON first: whatever becomes a text there is cleaned as one.
            value["extra"] = _clean_inside(redact(json.loads(to_json(extra))), clean)
        return to_json(value)


def _clean_inside(value: Any, clean: Callable[[str], str]) -> Any:
    """Clean every text in a JSON value."""
    if isinstance(value, dict):
        return {clean(key): _clean_inside(v, clean) for key, v in value.items()}
    if isinstance(value, list):
        return [_clean_inside(v, clean) for v in value]
    return clean(value) if isinstance(value, str) else value


def _file_handler(path: Path, formatter: logging.Formatter) -> logging.Handler:
    handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(formatter)
    return handler


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == "jaxrl"


@contextlib.contextmanager
def _faults_to(path: Path) -> Iterator[None]:
    """Have a crash of the interpreter itself, such as a segmentation fault, written down with the stack of every thread.

    One handler serves a process: one that is on already, under a debugger or a test runner, stays.
    """
    if faulthandler.is_enabled():
        yield
        return
    with path.open("a", encoding="utf-8") as file:
        size_before = file.tell()
        file.write(f"process started {time.strftime('%Y-%m-%d %H:%M:%S')}; what follows, if anything, ended it\n")
        file.flush()
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            file.truncate(size_before)
            if size_before == 0:
                path.unlink(missing_ok=True)
