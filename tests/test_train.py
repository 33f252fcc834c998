"""`python -m jaxrl.train`: a dry run, and what each kind of ending is as an exit code and a sentence."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import launch, train
from jaxrl.blame import failing_in
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.errors import CheckpointError, ConfigError, DeadlineError, JaxrlError, ModelLoadError, RunFailedError
from jaxrl.monitors.crash import CrashReporter
from jaxrl.monitors.logs import Redactor, RunLog

FAKE_KEY = "sk-" + "a1B2c3D4e5F6g7H8i9J0"
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"

DRY_RUN = """
import sys
from jaxrl import train
code = train.main(["--config", sys.argv[1], "--run.max_steps=7", "--dry-run"])
assert code == 0, code
assert not {"jax", "transformers", "reasoning_gym"} & sys.modules.keys()
"""


def test_a_dry_run_prints_the_resolved_configuration_and_touches_no_device(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DRY_RUN, str(CONFIG)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.toml").write_text(done.stdout, encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == load_config(CONFIG, ["--run.max_steps=7"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (None, 0, ""),
        (ConfigError("no such folder"), 2, "Configuration error: no such folder"),
        (ModelLoadError("model.safetensors is cut"), 2, "Configuration error: model.safetensors is cut"),
        (RunFailedError("nothing to train on"), 1, "The run failed: nothing to train on"),
        (CheckpointError("the disk is full"), 1, "The run failed: the disk is full"),
        (DeadlineError("waited 5 s"), 1, "The run failed: waited 5 s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_ending_is_an_exit_code_and_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: BaseException | None, code: int, said: str
) -> None:
    def end(config: object, *, resume: bool) -> launch.Outcome:
        assert not resume
        if ending is not None:
            raise ending
        return launch.Outcome(Path("runs/here"), step=3, is_complete=True)

    monkeypatch.setattr(launch, "launch", end)
    assert train.main(["--config", str(CONFIG)]) == code
    out, shown = capsys.readouterr()
    assert ("run folder: runs/here" in out) == (code == 0)
    assert said in shown and "Traceback" not in shown
    assert isinstance(ending, JaxrlError | None)


def test_ctrl_c_that_nobody_else_handles_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Exited(BaseException):
        """Stands for the end of the process."""

    def end_process(code: int) -> None:
        raise Exited(code)

    def load(config: object, *, resume: bool) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # as libraries do
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "_exit", end_process)
    monkeypatch.setattr(launch, "launch", load)
    # Tests that run in the background may have been started with the signal ignored.
    started_with = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Exited, match="130"):
            train.main(["--config", str(CONFIG)])
        assert "no step was lost" in capfd.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, started_with)


def test_a_fault_of_our_own_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(config: object, *, resume: bool) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(launch, "launch", end)
    with pytest.raises(KeyError, match="a bug"):
        train.main(["--config", str(CONFIG)])


@pytest.mark.parametrize("fault", [RunFailedError("nothing to train on"), KeyError(f"a bug, {FAKE_KEY}")], ids=["ours to tell", "a bug"])
def test_a_run_that_left_a_report_shows_its_short_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: Exception
) -> None:
    def end(config: object, *, resume: bool) -> None:
        with CrashReporter(tmp_path, RunLog(Redactor()), lambda: 3).reporting(), failing_in("trainer"):
            raise fault

    monkeypatch.setattr(launch, "launch", end)
    assert train.main(["--config", str(CONFIG)]) == train.EXIT_FAILED
    shown = capsys.readouterr().err
    assert ("Traceback" in shown and "in end\n" in shown) == (not isinstance(fault, JaxrlError))
    assert FAKE_KEY not in shown
    assert "component: trainer" in shown and f"resume with: {sys.executable} -m jaxrl.train --resume {tmp_path}\n" in shown


def test_a_run_that_was_moved_goes_on_in_its_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def end(config: RunConfig, *, resume: bool) -> launch.Outcome:
        seen.append((config.run_dir, resume))
        return launch.Outcome(config.run_dir, step=3, is_complete=True)

    monkeypatch.setattr(launch, "launch", end)
    (tmp_path / "config.toml").write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
    assert train.main(["--resume", str(tmp_path)]) == 0
    assert seen == [(tmp_path, True)]
