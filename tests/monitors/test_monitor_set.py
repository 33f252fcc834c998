"""`jaxrl.monitors.MonitorSet`: one object behind which nothing can stop a run."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxrl.config.monitors import MonitorsConfig
from jaxrl.errors import ConfigError
from jaxrl.monitors import MonitorSet, metrics
from jaxrl.monitors.environment import describe_environment
from jaxrl.monitors.jsonl import read_lines
from jaxrl.types import Bucket, PackedSample, Rollout, Task, Training
from tests.builders import make_rollout


def monitors(run_dir: Path, **options: Any) -> MonitorSet:
    config = options.pop("config", MonitorsConfig())
    return MonitorSet(run_dir, config, name="run", max_steps=9, console=Console(file=io.StringIO()), **options)


def rollout(env_name: str = "add") -> Rollout:
    return Rollout(Task(env_name, "t", {}), "g", 0, 0, reward=1.0)


def test_a_run_leaves_metrics_rollouts_evals_environment_and_picture(tmp_path: Path) -> None:
    m = monitors(tmp_path, devices=["cpu:0"])
    m.log_eval(0, "add", {"success_rate": 0.5}, [{"task": "t"}])
    m.log_rollouts(1, [rollout(), rollout()])
    m.log_step(1, {metrics.REWARD_MEAN: 1.0})
    m.close()
    m.close()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "environment.json",
        "evals/step_000000.add.jsonl",
        "metrics.jsonl",
        "reward_curve.png",
        "rollouts/step_000001.jsonl",
    ]
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/add/success_rate": 0.5}, {"step": 1, "rollout/reward/mean": 1.0}]
    assert len(read_lines(tmp_path / "rollouts" / "step_000001.jsonl")) == 2
    m.note(start_up={"load_s": 1.5})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["devices"] == ["cpu:0"] and environment["start_up"] == {"load_s": 1.5}


def test_monitors_that_are_off_write_nothing_and_metrics_are_always_on(tmp_path: Path) -> None:
    m = monitors(tmp_path, config=MonitorsConfig(terminal=False, rollouts=False, plot=False))
    m.log_rollouts(1, [rollout()])
    m.log_step(1, {metrics.REWARD_MEAN: 1.0})
    m.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["environment.json", "metrics.jsonl"]


def test_rollouts_are_written_with_the_texts_of_their_tokens_unless_the_token_export_is_off(tmp_path: Path) -> None:
    for is_on in (True, False):
        config = MonitorsConfig(terminal=False, plot=False, token_export=is_on)
        m = monitors(tmp_path / str(is_on), config=config, decode_token=lambda token_id: f"<{token_id}>")
        rollout = make_rollout(turns=(((1, 2), (3,)),))
        m.log_rollouts(1, [rollout])
        rollout.bucket, rollout.training, rollout.is_frozen = Bucket.TRAINED, Training.APPLIED, True
        rollout.packed = [PackedSample(0, 3, np.float32([0, 0, -0.25]))]
        m.update_rollouts(1, [rollout])
        m.close()
        (row,) = read_lines(tmp_path / str(is_on) / "rollouts" / "step_000001.jsonl")
        assert row["samples"][0].get("text") == (["<1>", "<2>", "<3>"] if is_on else None)
        assert row["samples"][0]["streams"].get("trainer_logprobs") == ([None, None, -0.25] if is_on else None)
        assert row["samples"][0]["token_ids"] == [1, 2, 3]
        assert [path.name for path in (tmp_path / str(is_on) / "rollouts").iterdir()] == ["step_000001.jsonl"]


def test_one_rollout_of_every_so_many_steps_is_shown_on_the_terminal_as_a_conversation(tmp_path: Path) -> None:
    out = io.StringIO()
    config = MonitorsConfig(rollouts=False, plot=False, show_rollout_every_n_steps=2)
    m = MonitorSet(tmp_path, config, name="run", max_steps=9, console=Console(file=out))
    for step in (1, 2, 3, 4):
        m.update_rollouts(step, [rollout(), *(make_rollout(task_id=f"t{step}-{i}", content=":smile: [b]") for i in range(3))])
    m.close()
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        "step 2 · toy · task t2-2 · toy/0, member 0",
        "step 4 · toy · task t4-1 · toy/0, member 0",
    ], "the second of every two steps, another place of the order each time, and never one that did not begin"
    assert lines.count("  :smile: [b]") == 2 and (tmp_path / "rollouts").exists() is False


def test_every_start_of_a_run_stays_in_the_environment_and_a_broken_file_stops_nothing(tmp_path: Path) -> None:
    for resume_step, load_s in ((None, 1.0), (6, 2.0), (6, 3.0)):
        m = monitors(tmp_path, resume_step=resume_step)
        m.note(start_up={"load_s": load_s})
        m.close()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["start_up"] == {"load_s": 1.0} and "resumed_step" not in environment
    assert [(start["resumed_step"], start["start_up"]["load_s"]) for start in environment["resumes"]] == [(6, 2.0), (6, 3.0)]
    assert environment["resumes"][0].keys() == {*environment, "resumed_step"} - {"resumes"}
    (tmp_path / "environment.json").write_text("{", encoding="utf-8")
    monitors(tmp_path, resume_step=6).close()
    assert "jax" in json.loads((tmp_path / "environment.json").read_text())["packages"]


def test_resuming_removes_what_later_steps_wrote(tmp_path: Path) -> None:
    m = monitors(tmp_path)
    for step in (1, 2, 3):
        m.log_rollouts(step, [rollout()])
        m.log_eval(step, "add", {"success_rate": step / 10}, [{}], write_result=lambda path: path.write_text("{}"))
    m.close()
    monitors(tmp_path, resume_step=1).close()
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]
    assert sorted(p.name for p in (tmp_path / "evals").iterdir()) == ["step_000001.add.json", "step_000001.add.jsonl"]


def test_the_result_of_an_evaluation_is_written_after_its_rows_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    m = monitors(tmp_path)
    result = tmp_path / "evals" / "step_000000.add.json"
    m.log_eval(
        0, "add", {}, [{"n": 1}], write_result=lambda path: path.write_text(str(len(read_lines(tmp_path / "evals" / f"{path.name}l"))))
    )
    assert result.read_text() == "1"

    def broken() -> Iterator[dict[str, int]]:
        yield {"n": 2}
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING):
        m.log_eval(0, "add", {}, broken(), write_result=lambda path: path.write_text("whole"))
    m.close()
    assert not result.exists() and "monitor 'evals' failed" in caplog.records[0].getMessage()


def test_a_new_run_takes_nothing_over_that_an_earlier_one_left_in_its_folder(tmp_path: Path) -> None:
    m = monitors(tmp_path)
    m.log_eval(0, "add", {}, [{}], write_result=lambda path: path.write_text("{}"))
    m.close()
    (tmp_path / "metrics.jsonl").unlink()
    monitors(tmp_path).close()
    assert list((tmp_path / "evals").iterdir()) == []


def test_a_monitor_that_fails_warns_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    m = monitors(tmp_path)
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        m.log_rollouts(1, [rollout()])
        m.log_rollouts(2, [rollout()])
    m.log_step(1, {metrics.REWARD_MEAN: 1.0})
    m.close()
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["monitor 'rollouts' failed"]
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_does_not_start_without_its_record(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError):
        monitors(tmp_path / "x")


def test_an_evaluation_written_twice_replaces_its_rows(tmp_path: Path) -> None:
    m = monitors(tmp_path)
    m.log_eval(2, "add", {"success_rate": 0.1}, [{"n": 1}, {"n": 2}])
    m.log_eval(2, "add", {"success_rate": 0.2}, [{"n": 3}])
    m.close()
    assert read_lines(tmp_path / "evals" / "step_000002.add.jsonl") == [{"n": 3}]
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 2, "eval/add/success_rate": 0.2}]


def test_the_environment_names_versions_and_no_person_or_host() -> None:
    described = describe_environment(["gpu:0"])
    assert set(described) == {"jaxrl", "commit", "is_modified", "started", "python", "platform", "num_cpus", "devices", "packages"}
    assert described["packages"]["numpy"]


def test_every_metric_constant_has_a_meaning() -> None:
    names = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    assert names <= set(metrics.MEANINGS)
    assert metrics.eval_score("a", "x") == "eval/a/x" and metrics.ledger_count("stale") == "ledger/stale"
    assert metrics.reward_mean("a") == "rollout/reward/mean/a" and metrics.task_metric("a", "groups") == "tasks/a/groups"
    assert metrics.filter_frac("z") == "filters/z/frac"
