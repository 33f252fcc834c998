"""The report of a run that failed: which component, why, where each part stood, and the command that goes on from what is saved.

In: an exception that left the run, and what the run registered beforehand. Out: `crash.json` and `crash.txt` in the run folder and a
panel for a terminal, all without secrets. A component is named where its part begins (`blame.failing_in`), never guessed from
a traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxrl.blame import causes_of, component_of_error
from jaxrl.monitors.folder import resume_command
from jaxrl.monitors.logs import RunLog, text_of

logger = logging.getLogger(__name__)

_REPORT = "_jaxrl_crash_report"
_ENDED_WAITS = ("TimeoutError", "CancelledError")
"""What Python raises where a wait ends; without words, it says nothing that the error above it does not."""


def report_of(error: BaseException) -> dict[str, Any] | None:
    """Return the report that was written about an exception, if there is one."""
    return getattr(error, _REPORT, None)


class CrashReporter:
    """Knows where the parts of a run stand, and writes it down when the run fails."""

    def __init__(self, run_dir: Path, log: RunLog, saved_step: Callable[[], int | None]) -> None:
        """Prepare; reports of an earlier process are removed.

        Args:
          run_dir: the run folder, which exists.
          log: how secrets are cut, and which threads failed.
          saved_step: the newest step that a resume would start from; None if there is none.
        """
        self._run_dir = run_dir
        self._log = log
        self._saved_step = saved_step
        self._parts: dict[str, Callable[[], object]] = {}
        self._states: dict[str, str] | None = None
        for name in ("crash.json", "crash.txt"):
            with contextlib.suppress(OSError):
                (run_dir / name).unlink(missing_ok=True)

    def watch(self, part: str, describe: Callable[[], object]) -> None:
        """Have a report say of a part what `describe` returns then; called from the thread that reports."""
        self._parts[part] = describe

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Remember where each part stands when an exception leaves the block; what winds down afterwards would have less to say."""
        try:
            yield
        except BaseException:
            self._states = self._states or self._describe()
            raise

    @contextlib.contextmanager
    def reporting(self, *unreported: type[BaseException]) -> Iterator[None]:
        """Write a report of the exception that leaves the block, unless a block inside has, and let it go on.

        Args:
          unreported: kinds that are the user's to mend and are told in full elsewhere.
        """
        try:
            yield
        except unreported:
            raise
        except Exception as error:
            if report_of(error) is None:
                self.write(error)
            raise

    def write(self, error: BaseException) -> dict[str, Any]:
        """Write `crash.json` and `crash.txt` and return the report; what cannot be found out is left out, and nothing is raised."""
        report = self._report(error)
        with contextlib.suppress(Exception):  # a class that takes no attributes
            setattr(error, _REPORT, report)
        for name, text in (("crash.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n"), ("crash.txt", as_text(report))):
            try:
                (self._run_dir / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            except OSError as failure:
                logger.error("the crash report could not be written: %s", failure)
        resume = f"; step {report['saved_step']} is saved; resume with: {report['resume']}" if report["resume"] else "; no step is saved"
        # The whole of it is for the log; a terminal shows the panel.
        logger.info("the run failed in component %r: %s%s", report["component"], report["error"]["message"], resume, exc_info=error)
        return report

    def _report(self, error: BaseException) -> dict[str, Any]:
        clean = self._log.clean
        saved = self._try(self._saved_step)
        saved_step = saved if isinstance(saved, int) else None
        chain = [{"type": type(part).__name__, "message": clean(text_of(part))} for part in causes_of(error)]
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": component_of_error(error),
            "error": chain[0],
            "causes": chain[1:],
            "last_reported_step": self._log.step,
            "parts": self._states or self._describe(),
            "failed_threads": list(self._log.failed_threads),
            "saved_step": saved_step,
            "resume": None if saved_step is None else resume_command(self._run_dir),
            "run_dir": str(self._run_dir),
            "environment": self._try(self._environment),
            "traceback": clean("".join(traceback.format_exception(error))).splitlines(),
        }

    def _describe(self) -> dict[str, str]:
        return {part: self._log.clean(str(self._try(describe))) for part, describe in self._parts.items()}

    def _environment(self) -> Any:
        environment = json.loads((self._run_dir / "environment.json").read_text(encoding="utf-8"))
        return environment["resumes"][-1] if environment.get("resumes") else environment

    @staticmethod
    def _try(ask: Callable[[], object]) -> object:
        try:
            return ask()
        except Exception as error:  # a part that is broken cannot say where it stands
            return f"unknown ({type(error).__name__}: {text_of(error)})"


def as_text(report: dict[str, Any]) -> str:
    """Return a report for people: what the panel says, then everything else."""
    environment = report["environment"] if isinstance(report["environment"], dict) else {}
    versions = environment.get("packages")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version) if isinstance(versions, dict) else ""
    lines = [
        *_summary(report),
        *_what_to_do(report),
        "",
        *[f"{part}: {state}" for part, state in report["parts"].items()],
        *[f"also failed: {line}" for line in report["failed_threads"]],
        "",
        f"at {report['time']}, jaxrl {environment.get('jaxrl')}, commit {environment.get('commit')}, Python {environment.get('python')}, "
        f"{environment.get('platform')}",
        packages,
        "",
        *report["traceback"],
    ]
    return "\n".join(lines) + "\n"


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report's short form as a panel, and below it, whole and on one line, what there is to copy."""
    console.print(Panel(Text("\n".join(_summary(report))), title="The run failed", title_align="left", border_style="red"))
    for line in _what_to_do(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary(report: dict[str, Any]) -> list[str]:
    error = report["error"]
    lines = [f"component: {report['component']}", f"{error['type']}: {error['message']}", *_causes(report)]
    step = report["last_reported_step"]
    lines.append("no step was finished by this process" if step is None else f"last finished step: {step}")
    return lines


def _causes(report: dict[str, Any]) -> Iterator[str]:
    """Yield the causes that say something new: not that a wait ended, nor what was said already."""
    said = [report["error"]["message"]]
    for cause in report["causes"]:
        words = cause["message"].strip()
        if words and not any(words in earlier for earlier in said):
            said.append(words)
            yield f"caused by {cause['type']}: {words}"
        elif not words and cause["type"] not in _ENDED_WAITS:
            yield f"caused by {cause['type']}"


def _what_to_do(report: dict[str, Any]) -> list[str]:
    more = f"more in {report['run_dir']}/crash.txt and {report['run_dir']}/logs"
    if report["resume"] is None:
        anew = f"delete {report['run_dir']}, or choose another `run.name` or `run.output_dir`, and start again"
        return [f"no step is saved: mend the cause, {anew}", more]
    return [f"step {report['saved_step']} is saved; resume with: {report['resume']}", more]
