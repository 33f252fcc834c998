"""`python -m jaxrl.serve`: a dry run, what ends it before it serves, and an orderly stop."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import serve
from jaxrl.config.load import load_config
from jaxrl.config.serve import ServeConfig
from jaxrl.errors import DeadlineError
from jaxrl.launch import serving

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "serve_smollm2.toml"
SMALL = [
    "--config", str(CONFIG), f"--model.name={ROOT}/configs/quickstart/start_model", "--server.port=0",
    "--inference.num_slots=2", "--inference.max_model_len=16", "--inference.min_prefill_bucket=16", "--server.max_logprobs=0",
]  # fmt: skip

DRY_RUN = """
import sys
from jaxrl import serve
code = serve.main(["--config", sys.argv[1], "--server.port=7", "--dry-run"])
assert code == 0, code
assert not {"jax", "transformers", "starlette"} & sys.modules.keys()
"""


def test_a_dry_run_prints_the_resolved_configuration_and_touches_no_device(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DRY_RUN, str(CONFIG)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "serve.toml").write_text(done.stdout, encoding="utf-8")
    assert load_config(tmp_path / "serve.toml", (), ServeConfig) == load_config(CONFIG, ["--server.port=7"], ServeConfig)


def said_by(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert serve.main([*SMALL, *overrides]) == 2
    shown = capsys.readouterr().err
    assert "Configuration error" in shown and "Traceback" not in shown
    return shown


def test_what_cannot_be_used_ends_with_code_2_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = said_by(capsys, f"--server.port={port}")
        assert f"`server.port`={port}: another program listens there; stop it, or choose another port" in shown
    assert "`server.host`='no.such.host.invalid'" in said_by(capsys, "--server.host=no.such.host.invalid", "--server.api_key_var=PATH")
    monkeypatch.setenv("JAXRL_EMPTY", " ")
    assert "environment variable JAXRL_EMPTY is not set or empty" in said_by(capsys, "--server.api_key_var=JAXRL_EMPTY")
    assert "`model.renderer`='nobody'" in said_by(capsys, "--model.renderer=nobody")
    assert str(tmp_path / "none") in said_by(capsys, f"--model.name={tmp_path / 'none'}")
    assert "beyond the 512 positions" in said_by(capsys, "--inference.max_model_len=513")


def test_a_server_that_fails_ends_with_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def end(config: object, say: object) -> None:
        raise DeadlineError("waited 5 s")

    monkeypatch.setattr(serving, "serve", end)
    assert serve.main(SMALL) == 1
    assert "The server failed: waited 5 s" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["listening at", pytest.param("serving 'smollm2' at", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_server_in_order(when: str) -> None:
    """Also while it loads: the rest of the programs is not compiled."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "jaxrl.serve", *SMALL], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line)
            if line.startswith(when):
                assert re.search(r"at http://127\.0\.0\.1:\d+/v1", line)
                child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0, "".join(said)
    assert sum(line.startswith("stopping: ") for line in said) == 1
    assert "Traceback" not in "".join(said)
