"""`python -m jaxrl.rollouts`: conversations of a run on standard output, and what is said when there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.config.monitors import MonitorsConfig
from jaxrl.monitors import MonitorSet
from jaxrl.rollouts import main
from tests.builders import make_rollout


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    monitors = MonitorSet(tmp_path / "run", MonitorsConfig(terminal=False, plot=False), name="run", max_steps=1)
    monitors.log_rollouts(1, [make_rollout(reward, content=f"worth {reward} [b]") for reward in (0.0, 1.0, 0.5)])
    monitors.close()
    return tmp_path / "run"


def test_the_conversations_of_the_newest_step_are_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--best", "--num", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run_dir}/rollouts/step_000001.jsonl: 1 of 3 rollouts, highest reward first, --num shows more",
        "",
        "step 1 · toy · task task-0 · toy/0, member 0",
        "reward 1 · pending · done · 1 turn · 3 tokens written, 5 in all",
        "user · 2 tokens",
        "  1 2",
        "assistant · turn 1 · 3 tokens",
        "  worth 1.0 [b]",
    ]


def test_what_cannot_be_shown_is_a_sentence_and_an_exit_code(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_dir / "rollouts" / "step_000001.jsonl"
    assert main([str(run_dir / "nowhere")]) == 2
    assert main([str(run_dir), "--errors"]) == 1
    file.write_text("{\n" + file.read_text())
    assert main([str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second, third = shown.err.splitlines()
    assert first.startswith("there is no `") and "none failed" in second and "cannot be read" in third and "line 1" in third
    with pytest.raises(SystemExit) as caught:
        main([str(run_dir), "--num", "0"])
    assert caught.value.code == 2 and "expected a whole number above 0, got '0'" in capsys.readouterr().err


def test_a_reader_that_goes_away_leaves_no_traceback_and_a_terminal_of_few_characters_is_enough(run_dir: Path) -> None:
    file = run_dir / "rollouts" / "step_000001.jsonl"
    file.write_text(file.read_text() * 2000)
    command = f"{sys.executable} -m jaxrl.rollouts {run_dir} --num 6000 --full | head -n 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env={"PYTHONIOENCODING": "ascii"})
    assert done.stderr == ""
    assert done.stdout.splitlines()[2] == "step 1 \\xb7 toy \\xb7 task task-0 \\xb7 toy/0, member 0"
