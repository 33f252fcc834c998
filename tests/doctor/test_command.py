"""What the command prints and returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import doctor
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, Level
from jaxrl.doctor.settings import check_config
from jaxrl.errors import ConfigError
from tests.doctor.patients import ModelDir, examine_run, lines_of, questions_config, tools_config
from tests.e2e.runs import ROOT, SMALL, small_arguments

CHEAP = ("config", "tokenizer", "template", "budgets", "rewards", "demonstrations", "endpoint", "head", "model")


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    code = doctor.main(["--config", str(ROOT / "configs/quickstart.toml"), *SMALL, *arguments])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    return code, shown.out + shown.err


def test_checks_that_are_good_are_one_line_each_and_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diagnose(capsys, *(f"--check={name}" for name in CHEAP))
    assert code == 0
    found = {name: (level, said) for level, name, said in lines_of(text)}
    assert list(found) == list(CHEAP) and {level for level, _ in found.values()} == {"ok"}
    assert "200 steps of 32 rollouts in groups of 8" in found["config"][1]
    assert "385 ids for 512 rows of the embedding, no BOS token" in found["tokenizer"][1] and "'<|im_end|>' (2)" in found["tokenizer"][1]
    assert "each turn continues the one before (user, system, thinking, list content" in found["template"][1]
    assert "+ reply 32 =" in found["budgets"][1]
    assert "its demonstration is worth 1, nonsense is worth 0" in found["rewards"][1]
    assert found["demonstrations"][1] == "no environment learns from demonstrations"
    assert found["endpoint"][1] == "no external server is named"
    assert found["head"][1].startswith("tied")
    assert "656,448 parameters" in found["model"][1]


def test_the_module_runs_as_a_command_and_a_check_that_needs_no_device_does_not_wait_for_jax() -> None:
    told = "import atexit, runpy, sys; atexit.register(lambda: print(sorted({'jax', 'flax', 'transformers'} & sys.modules.keys())))"
    program = f"{told}; sys.argv[0] = 'doctor'; runpy.run_module('jaxrl.doctor', run_name='__main__')"
    command = [sys.executable, "-c", program, "--config", "configs/quickstart.toml", "--check=config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok   config") and done.stdout.endswith("\n[]\n")


def test_a_configuration_that_does_not_load_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diagnose(capsys, "--trainer.row=3")
    assert code == 2
    assert "unknown key `trainer.row`" in text


def test_an_unknown_check_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        diagnose(capsys, "--check=everything")
    assert caught.value.code == 2
    assert "everything" in capsys.readouterr().err


def test_resume_alone_must_be_asked_for() -> None:
    assert [name for name in doctor.CHECKS if name not in doctor.DEFAULT_CHECKS] == ["resume"]


def test_a_failed_check_is_code_1_and_the_others_still_run(capsys: pytest.CaptureFixture[str], model_dir: ModelDir) -> None:
    weights = model_dir.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, text = diagnose(capsys, model_dir.override, "--check=model", "--check=tokenizer")
    assert code == 1
    failed, fine = lines_of(text)
    assert failed[:2] == ("FAIL", "model") and "model.safetensors" in failed[2]
    assert fine[:2] == ("ok", "tokenizer")


def test_a_warning_does_not_change_the_exit_code(capsys: pytest.CaptureFixture[str], model_dir: ModelDir) -> None:
    model_dir.edit_template(before="{%- set today = strftime_now('%d %b %Y') -%}")
    code, text = diagnose(capsys, model_dir.override, "--check=template")
    assert code == 0 and text.startswith("warn template")


def test_the_doctor_leaves_no_run_folder(tmp_path: Path) -> None:
    arguments = small_arguments(tmp_path / "run")
    assert doctor.main([*arguments, "--check=config", "--check=budgets"]) == 0
    assert not (tmp_path / "run").exists()


def test_a_check_that_cannot_stand_what_it_finds_is_a_failed_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(exam: object) -> Finding:
        raise KeyError("answer")

    monkeypatch.setitem(doctor.CHECKS, "budgets", check)
    code, text = diagnose(capsys, "--check=budgets", "--check=config")
    assert code == 1
    assert "FAIL budgets        the check itself failed with KeyError: 'answer'" in text and "ok   config" in text


def test_what_several_checks_need_is_told_once_by_its_cause_and_the_others_are_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(exam: Examination) -> Finding:
        try:
            _ = exam.worlds
        except ConfigError as error:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ExceptionGroup("inner", [error]), KeyError("other")]) from None
        raise AssertionError

    monkeypatch.setitem(doctor.CHECKS, "parity", check)
    questions_config(tmp_path, [])
    (tmp_path / "rows.jsonl").unlink()
    checks = [f"--check={name}" for name in ("rewards", "budgets", "parity", "config")]
    assert doctor.main(["--config", str(tmp_path / "run.toml"), *checks]) == 1
    first, *skipped, fine = lines_of(capsys.readouterr().out)
    assert first[:2] == ("FAIL", "rewards") and "rows.jsonl': there is no such file" in first[2]
    assert skipped == [("skip", name, "it needs what failed in the check of rewards") for name in ("budgets", "parity")]
    assert fine[:2] == ("ok", "config")


REWARD = "reward = {type = 'python', import_path = 'tests.doctor.grading:fair'}"
ECHO = "{type = 'echo', filter = {import_path = 'tests.doctor.grading:fair'}}"


def test_an_import_path_that_leads_nowhere_is_found_by_the_check_of_the_configuration(tmp_path: Path) -> None:
    def look(env: str, algo: str) -> Finding:
        return examine_run(check_config, tools_config(tmp_path, env=env, algo=algo))

    assert look(REWARD, ECHO).is_good
    finding, key = look(REWARD, ECHO.replace("fair", "fairer")), "orchestrator.train.env.0.algo.filter.import_path"
    assert finding.level is Level.BAD
    assert finding.text.startswith(f"`{key}`='tests.doctor.grading:fairer' cannot be imported: AttributeError: ")
    finding = look(REWARD.replace("tests.doctor.grading", "no_such_module"), ECHO)
    assert finding.level is Level.BAD and finding.text.startswith("`orchestrator.train.env.0.reward.import_path`='no_such_module:fair'")
    assert finding.text.endswith("it must be importable from where the run is started")
