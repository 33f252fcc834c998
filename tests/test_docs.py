"""What the documents say is true: their Python runs, their commands and links exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.cli import VERBS
from jaxrl.config.load import load_config
from jaxrl.monitors.metrics import MEANINGS
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return (where, code) of every block of a language, those of one document joined so that later ones may use earlier ones."""
    found = []
    for path in DOCS:
        codes = [code for lang, code in BLOCK.findall(path.read_text(encoding="utf-8")) if lang == language]
        if codes:
            found.append((str(path.relative_to(ROOT)), "\n".join(codes)))
    return found


def code_of(path: Path) -> str:
    """Return everything in a document that is set as code."""
    text = path.read_text(encoding="utf-8")
    return "\n".join([code for _, code in BLOCK.findall(text)] + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)))


@pytest.mark.parametrize(("where", "code"), blocks("python"), ids=lambda value: value if value.endswith(".md") else "")
def test_the_python_of_a_document_runs(where: str, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=None)
    assert done.returncode == 0, f"{where}:\n{done.stderr}"


def test_the_configuration_that_the_readme_shows_is_one_and_its_table_has_every_algorithm(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = (code for lang, code in BLOCK.findall(text) if lang == "toml")
    (tmp_path / "run.toml").write_text(example)
    settings = load_config(tmp_path / "run.toml").orchestrator
    assert {settings.algo_of(env).type for env in settings.train.env} == {"grpo", "sft"}
    assert set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", text, re.MULTILINE)) == set(ALGORITHM_CLASSES)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_a_document_names_exist(path: Path) -> None:
    code = code_of(path)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", code)) <= targets
    for module in set(re.findall(r"python -m (jaxrl[\w.]*)", code)):
        assert importlib.util.find_spec(module) is not None, module
    assert set(re.findall(r"(?:^|\s)jaxrl ([a-z]+)\b", code)) <= set(VERBS)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_links_to_exist(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_tests_that_the_documents_name_exist() -> None:
    named = [match.split("::") for path in DOCS for match in re.findall(r"`(tests/[\w/]+\.py::\w+)`", path.read_text(encoding="utf-8"))]
    assert named
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in sources[file]] == []


def test_every_metric_is_in_the_document_of_metrics() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name, meaning in MEANINGS.items() if f"| `{name}` | {meaning} |" not in text] == []


def test_the_cluster_script_of_the_gpu_document_resumes_what_has_a_checkpoint_and_else_begins_anew(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "running_on_gpu_and_tpu.md").read_text(encoding="utf-8")
    (script,) = (code for lang, code in BLOCK.findall(text) if lang == "bash" and code.startswith("#!/bin/bash"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nmkdir -p runs/smollm2_chain_sum/checkpoints/step_000010.orbax-checkpoint-tmp; echo "$@"\n')
    python.chmod(0o755)

    def started() -> str:
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20).stdout

    assert "--config configs/smollm2_chain_sum.toml" in started()
    assert "--config" in started(), "a save that was cut short is no checkpoint"
    assert len(list((tmp_path / "runs").iterdir())) == 2, "the folder of the first try is kept under another name"
    (tmp_path / "runs" / "smollm2_chain_sum" / "checkpoints" / "step_000010").mkdir()
    assert started() == "-m jaxrl.train --resume runs/smollm2_chain_sum\n"


def test_agents_md_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 120
