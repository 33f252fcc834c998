"""`jaxrl.monitors.crash`: which component failed, what the report says, and what it never says."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxrl.blame import blame, component_of_error, failing_in
from jaxrl.errors import ConfigError, DeadlineError, RunFailedError
from jaxrl.monitors.crash import CrashReporter, report_of, show
from jaxrl.monitors.logs import Redactor, RunLog

FAKE_KEY = "sk-" + "a1B2c3D4e5F6g7H8i9J0"


def reporter(run_dir: Path, saved_step: int | None = 4, step: int | None = 5) -> CrashReporter:
    log = RunLog(Redactor(["correct-horse"]))
    log.step = step
    return CrashReporter(run_dir, log, lambda: saved_step)


def failed_run(crash: CrashReporter) -> Exception:
    """Fail in the engine, under the orchestrator, and return what left the run."""
    with pytest.raises(RunFailedError) as caught, crash.reporting(ConfigError), failing_in("orchestrator"):
        try:
            with failing_in("engine"):
                raise ValueError(f"{FAKE_KEY} was refused")
        except ValueError as error:
            raise RunFailedError("8 rollouts in a row failed") from error
    return caught.value


def test_the_innermost_boundary_that_an_exception_crosses_names_the_component() -> None:
    with pytest.raises(KeyError) as caught, failing_in("orchestrator"), failing_in("environment 'sums'"):
        raise KeyError("answer")
    assert component_of_error(caught.value) == "environment 'sums'"
    assert component_of_error(ValueError("before anything began")) == "start-up"


def test_an_exception_that_reaches_the_other_arm_keeps_the_side_that_it_comes_from() -> None:
    error = blame(DeadlineError("no batch"), "trainer")
    with pytest.raises(DeadlineError), failing_in("orchestrator"):
        raise error
    assert component_of_error(error) == "trainer"


def test_a_report_names_the_component_the_causes_the_parts_and_the_command_that_goes_on(tmp_path: Path) -> None:
    crash = reporter(tmp_path)
    (tmp_path / "environment.json").write_text('{"packages": {"jax": "9.9"}}')
    crash.watch("device thread", lambda: "idle, asked with correct-horse")
    crash.watch("broken", lambda: 1 / 0)
    error = failed_run(crash)
    report = json.loads((tmp_path / "crash.json").read_text())
    assert report == report_of(error)
    assert report["component"] == "engine"
    assert report["error"] == {"type": "RunFailedError", "message": "8 rollouts in a row failed"}
    assert report["causes"] == [{"type": "ValueError", "message": "<redacted> was refused"}]
    assert (report["last_reported_step"], report["saved_step"]) == (5, 4)
    assert report["resume"].endswith(f"-m jaxrl.train --resume {tmp_path}")
    assert report["parts"] == {"device thread": "idle, asked with <redacted>", "broken": "unknown (ZeroDivisionError: division by zero)"}
    text = (tmp_path / "crash.txt").read_text()
    assert "jax 9.9" in text and "component: engine" in text and report["resume"] in text and "in failed_run" in text
    assert FAKE_KEY not in text + json.dumps(report)


def test_the_panel_is_short_and_the_command_below_it_is_on_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    show(report_of(failed_run(reporter(tmp_path))) or {}, Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert len(lines) < 12
    assert any("component: engine" in line for line in lines)
    assert any(line.startswith("step 4 is saved; resume with: ") and line.endswith(f"--resume {tmp_path}") for line in lines)


def test_without_a_checkpoint_no_resume_is_promised(tmp_path: Path) -> None:
    failed_run(reporter(tmp_path, saved_step=None, step=None))
    assert json.loads((tmp_path / "crash.json").read_text())["resume"] is None
    text = (tmp_path / "crash.txt").read_text()
    assert "--resume" not in text and "no step was finished by this process" in text
    assert f"no step is saved: mend the cause, delete {tmp_path}, or choose another `run.name`" in text


def test_causes_that_say_nothing_new_are_left_out_of_the_panel_only(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError) as caught, reporter(tmp_path).reporting():
        try:
            try:
                raise TimeoutError from AssertionError()
            except TimeoutError as error:
                raise DeadlineError("it was not ready: refused") from error
        except DeadlineError as error:
            raise DeadlineError(f"env 'sums': {error}") from error
    report = report_of(caught.value) or {}
    assert [cause["type"] for cause in report["causes"]] == ["DeadlineError", "TimeoutError", "AssertionError"]
    out = io.StringIO()
    show(report, Console(file=out, width=99))
    assert out.getvalue().count("it was not ready") == 1 and "TimeoutError" not in out.getvalue()
    assert "caused by AssertionError " in out.getvalue()


def test_a_mistake_of_the_user_leaves_no_report_and_a_new_process_removes_an_old_one(tmp_path: Path) -> None:
    failed_run(reporter(tmp_path))
    with pytest.raises(ConfigError), reporter(tmp_path).reporting(ConfigError):
        raise ConfigError("no such model")
    assert not list(tmp_path.glob("crash.*"))


def test_where_the_parts_stood_is_remembered_from_the_first_failure_and_told_once(tmp_path: Path) -> None:
    crash, doing = reporter(tmp_path), ["training"]
    crash.watch("trainer", lambda: doing[-1])
    with pytest.raises(RunFailedError) as caught, crash.reporting(), contextlib.ExitStack() as stack:
        stack.callback(crash.watch, "late", lambda: "registered after the report")
        stack.enter_context(crash.reporting())
        stack.callback(doing.append, "stopped")
        with crash.remembering():
            raise RunFailedError("out of memory")
    assert (report_of(caught.value) or {})["parts"] == {"trainer": "training"}
    assert json.loads((tmp_path / "crash.json").read_text())["parts"] == {"trainer": "training"}


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    crash = reporter(tmp_path)
    (tmp_path / "crash.json").mkdir()
    assert "8 rollouts" in str(failed_run(crash))
    assert "8 rollouts" in (tmp_path / "crash.txt").read_text(), "the other file is there"
    reporter(tmp_path)


class Awkward(Exception):
    """Cannot say what it is, takes no attributes, and compares with an exception."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def test_an_exception_that_cannot_even_be_printed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Awkward), reporter(tmp_path).reporting(), failing_in("environment 'sums'"):
        raise Awkward from Awkward()
    report = json.loads((tmp_path / "crash.json").read_text())
    assert report["component"] == "environment 'sums'"
    assert report["error"] == {"type": "Awkward", "message": "(it has no text)"} == report["causes"][0]


def test_a_group_is_named_after_the_first_of_its_exceptions(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup), reporter(tmp_path).reporting(), failing_in("orchestrator"):
        raise ExceptionGroup("both", [blame(ValueError(f"refused {FAKE_KEY}"), "engine"), KeyError("x")])
    report = json.loads((tmp_path / "crash.json").read_text())
    assert report["component"] == "engine"
    assert report["causes"] == [{"type": "ValueError", "message": "refused <redacted>"}]
    assert FAKE_KEY not in (tmp_path / "crash.txt").read_text()


def test_a_folder_with_a_blank_is_quoted_and_an_odd_environment_is_left_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / "environment.json").write_text('{"packages": {"jax": "first"}, "resumes": [{"packages": ["jax"]}]}')
    failed_run(reporter(run_dir))
    assert f"--resume '{run_dir}'\n" in (run_dir / "crash.txt").read_text()


def test_a_report_of_a_resumed_run_has_the_environment_of_its_own_start(tmp_path: Path) -> None:
    first, second = {"packages": {"jax": "1.0"}}, {"resumed_step": 6, "packages": {"jax": "2.0"}}
    (tmp_path / "environment.json").write_text(json.dumps(first | {"resumes": [second]}))
    failed_run(reporter(tmp_path))
    assert json.loads((tmp_path / "crash.json").read_text())["environment"] == second
