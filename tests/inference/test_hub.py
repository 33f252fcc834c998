"""Names on the Hugging Face hub, through the real client: against a cache on disk, and against a hub on loopback."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from jaxrl.errors import ModelLoadError
from jaxrl.inference import hub
from jaxrl.inference.hub import resolve_model_directory
from jaxrl.inference.rendering import Renderer
from jaxrl.models import load_pretrained, load_spec

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs" / "quickstart" / "start_model"
COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def put_into(cache: Path, repo: str, commit: str, revision: str, files: list[str] | None = None) -> Path:
    """Lay a model out as the client does: blobs, links to them under the commit, and the commit under the revision's name."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for directory in (folder / "blobs", folder / "refs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    for file in MODEL.iterdir():
        if files is None or file.name in files:
            blob = folder / "blobs" / f"{commit[:4]}{file.name}"
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_cached_name_loads_without_a_network_as_its_directory_would(cache):
    put_into(cache, "org/tiny", COMMIT, "main")
    model, params = load_pretrained("org/tiny")
    assert model.spec == load_spec("org/tiny") == load_spec(MODEL)
    assert params["embed"]["weight"].shape == (512, 128)
    question = [{"role": "user", "content": "1 + 1 ="}]
    ids = Renderer.from_pretrained("org/tiny").open_turn(None, question).prompt_ids.tolist()
    assert ids == Renderer.from_pretrained(MODEL).open_turn(None, question).prompt_ids.tolist()


def test_a_revision_picks_its_own_files(cache):
    newest = put_into(cache, "org/tiny", COMMIT, "main")
    older = put_into(cache, "org/tiny", OLDER, "v1.0")
    assert resolve_model_directory("org/tiny", "config") == newest
    assert resolve_model_directory("org/tiny@v1.0", "config") == older
    assert resolve_model_directory(f"org/tiny@{OLDER}", "config") == older


def test_a_cache_without_the_weights_says_what_it_holds(cache):
    put_into(cache, "org/tiny", COMMIT, "main", files=["config.json", "tokenizer.json"])
    with pytest.raises(ModelLoadError, match=r"neither model.safetensors nor .*holds config.json, tokenizer.json"):
        load_pretrained("org/tiny")


@pytest.mark.parametrize("name", ["org/absent", "org/absent@v2"])
@pytest.mark.parametrize("use", [load_spec, load_pretrained, Renderer.from_pretrained], ids=lambda use: use.__qualname__)
def test_a_name_that_is_nowhere_is_one_paragraph_that_says_what_was_tried_and_what_to_do(cache, name, use):
    with pytest.raises(ModelLoadError) as caught:
        use(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "`org/absent`",
        "not a directory",
        str(Path.cwd()),
        "https://huggingface.co",
        str(cache),
        "Pass the directory",
        "HF_HUB_OFFLINE=1",
    ):
        assert part in message
    assert ("at revision 'v2'" in message) == ("@" in name)


@pytest.mark.parametrize("name", ["./models/tiny", "/models/tiny", "~/tiny", "tiny", "a/b/c", "org/tiny@", "configs/mispelt"])
def test_what_can_only_be_a_path_is_never_looked_for_on_the_hub(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ModelLoadError, match=r"is not a directory on this machine.*not taken for a name"):
        resolve_model_directory(name, "config")


def test_a_directory_of_this_machine_comes_before_the_hub(cache, tmp_path, monkeypatch):
    put_into(cache, "org/tiny", COMMIT, "main")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model_directory("org/tiny", "config") == Path("org/tiny")


class FakeHub(BaseHTTPRequestHandler):
    """The three questions that the client asks: which commit, which files, and a file."""

    files = {file.name: file.read_bytes() for file in MODEL.iterdir()}
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.command == "GET":
            self.asked.append(path)
        if path.startswith("/api/models/org/tiny/tree/"):
            self.answer([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()])
        elif path.startswith("/api/models/org/tiny"):
            self.answer({"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]})
        elif path.startswith("/org/tiny/resolve/") and path.rpartition("/")[2] in self.files:
            self.answer(self.files[path.rpartition("/")[2]])
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(data)),
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hash(data)}"',
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def fake_hub() -> Iterator[tuple[str, list[str]]]:
    """(address, paths that were asked for) of a hub that has the one model org/tiny."""
    handler = type("Handler", (FakeHub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def in_fresh_process(code: str, tmp_path: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose hub client reads its settings anew: the client reads the environment once."""
    settings = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_tokenizer_is_fetched_without_weights_and_then_the_weights_alone(tmp_path, fake_hub):
    address, asked = fake_hub
    code = """
from jaxrl.inference.rendering import Renderer
from jaxrl.inference.hub import resolve_model_directory
Renderer.from_pretrained("org/tiny")
directory = resolve_model_directory("org/tiny", "tokenizer")
assert not list(directory.glob("*.safetensors")), list(directory.iterdir())
assert resolve_model_directory("org/tiny@main", "weights") == directory
print(*sorted(file.name for file in directory.iterdir()))
"""
    done = in_fresh_process(code, tmp_path, address)
    assert done.returncode == 0, done.stderr
    expected = {file.name for file in MODEL.iterdir()} - {"measured.json"}
    assert set(done.stdout.split()) == expected
    fetched = [path.rpartition("/")[2] for path in asked if "/resolve/" in path]
    assert sorted(fetched) == sorted(expected), "each file once"


def test_a_model_that_the_hub_does_not_have_is_one_error_that_says_so(tmp_path, fake_hub):
    code = 'from jaxrl.inference.hub import resolve_model_directory\nresolve_model_directory("org/absent", "weights")'
    done = in_fresh_process(code, tmp_path, fake_hub[0])
    assert "jaxrl.errors.ModelLoadError: `org/absent` is not a directory" in done.stderr
    assert fake_hub[0] in done.stderr.splitlines()[-1]


def test_a_hub_that_never_answers_is_given_up_and_the_cache_is_used(cache, monkeypatch, caplog):
    snapshot = put_into(cache, "org/tiny", COMMIT, "main")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(hub, "_ANSWER_DEADLINE_S", 0.2)
        assert resolve_model_directory("org/tiny", "config") == snapshot
        assert f"{address} did not answer" in caplog.text
        with pytest.raises(ModelLoadError, match=r"could not be fetched.*Timeout"):
            resolve_model_directory("org/absent", "config")


@pytest.mark.parametrize("name", ["~no-such-user/model", "m" * 5000], ids=["no home", "too long"])
def test_a_name_that_no_file_can_have_is_refused_as_one(name: str) -> None:
    with pytest.raises(ModelLoadError, match="is not a directory on this machine"):
        resolve_model_directory(name, "config")
