"""What a user sees when something in the command, the configuration or the model is wrong: exit code 2 and one paragraph."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxrl import train
from jaxrl.launch import training
from tests.e2e.runs import ROOT, small_arguments

MODEL = ROOT / "configs/quickstart/start_model"


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Return the paragraph that training refuses with."""
    assert train.main(arguments) == train.EXIT_USAGE
    text = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in text
    return text


def copy_of_the_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--trainer.optimizer.learning_rate=1", "`trainer.optimizer.learning_rate`"),
        ("--run.max_steps=many", "`run.max_steps`"),
        ("--orchestrator.batch_size=30", "not divisible by `orchestrator.group_size`=8"),
        ("--orchestrator.sampling.top_p=0.9", "`orchestrator.sampling.top_p`=0.9"),
        ("--orchestrator.sampling.temperature=0", "`orchestrator.sampling.temperature`=0"),
        ('--orchestrator.sampling.stop=[""]', "an empty string"),
        ("--orchestrator.sampling.temperature=1e-9", "use 0 for the likeliest token"),
        ("--orchestrator.model.name=/no/such/model", "/no/such/model"),
        ("--orchestrator.train.env.0.dataset=chain_sums", "chain_sum"),
        ("--trainer.mesh.data=3", "`trainer.mesh`"),
        ("--trainer.mesh.tensor=8", "`trainer.mesh.tensor`=8 does not divide the model's `num_heads`=4"),
        ("--inference.max_model_len=4096", "is beyond the"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(capsys, tmp_path, override, said):
    assert said in refusal(capsys, [*small_arguments(tmp_path / "run"), override])
    assert not (tmp_path / "run").exists()


def test_an_external_policy_server_is_refused_with_the_reason(capsys):
    arguments = ["--config", str(ROOT / "configs/quickstart.toml"), "--inference.type=openai"]
    assert "new weights cannot yet be loaded" in refusal(capsys, arguments)


def test_a_truncated_weight_file_is_named(capsys, tmp_path):
    model = copy_of_the_model(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = [*small_arguments(tmp_path / "run"), f"--orchestrator.model.name={model}", "--trainer.mesh.data=8", "--trainer.rows=1"]
    assert "model.safetensors" in refusal(capsys, arguments)


def test_a_window_beyond_the_model_s_positions_is_refused(capsys, tmp_path):
    beyond = ("--inference.max_model_len=600", "--trainer.row_length=600", "--trainer.mesh.data=8", "--trainer.rows=1")
    assert "512 positions" in refusal(capsys, [*small_arguments(tmp_path / "run"), *beyond])


def test_a_family_that_we_lack_is_named_with_those_that_we_have(capsys, tmp_path):
    model = copy_of_the_model(tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    arguments = [*small_arguments(tmp_path / "run"), f"--orchestrator.model.name={model}", "--trainer.mesh.data=8", "--trainer.rows=1"]
    text = refusal(capsys, arguments)
    assert "mamba" in text
    assert "qwen3" in text


def test_a_tokenizer_without_a_chat_template_is_refused(capsys, tmp_path):
    model = copy_of_the_model(tmp_path)
    (model / "chat_template.jinja").unlink()
    assert "chat template" in refusal(capsys, [*small_arguments(tmp_path / "run"), f"--orchestrator.model.name={model}"])


class ListsItsModels(BaseHTTPRequestHandler):
    """A server that serves `served`."""

    def do_GET(self) -> None:
        """Be well, and list the model."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "served", "max_model_len": 512}]}')

    def log_message(self, *_: object) -> None:
        """Be silent."""


def test_a_teacher_that_is_served_under_another_name_is_named_before_the_model_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "array_arm", None)
    with ThreadingHTTPServer(("127.0.0.1", 0), ListsItsModels) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        teacher = {"name": "mistyped", "base_url": [f"http://127.0.0.1:{server.server_port}/v1"]}
        algo = f"--orchestrator.algo={json.dumps({'type': 'opd', 'teacher': teacher})}"
        try:
            assert train.main([*small_arguments(tmp_path / "run"), "--trainer.mesh.data=8", "--trainer.rows=8", algo]) == train.EXIT_FAILED
        finally:
            server.shutdown()
    said = (tmp_path / "run" / "crash.txt").read_text()
    assert "`algo.teacher`: " in said and "does not serve 'mistyped'; it serves 'served'" in said and "environment 'chain_sum'" in said
    assert "The run failed" in capsys.readouterr().err


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from jaxrl import train
sys.exit(train.main(sys.argv[3:]))
"""


def test_the_embedded_engine_refuses_a_job_of_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = small_arguments(tmp_path / "run")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(index), *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == train.EXIT_USAGE, errors
        assert "this job has 2 processes" in " ".join(errors.split())
