"""What must not drift: no JAX in the asyncio arm, no drawer modules, small files, documented modules, a clean tree.

The layers themselves are import-linter's work (`make lint`).
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "jaxrl").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80
ASYNCIO_ARM = ("orchestrator", "envs", "tasks", "inference", "batching", "evals", "config", "types", "transport", "monitors")
ARRAY_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")

# Assembled, so that this file passes its own check.
FORBIDDEN_TEXT = re.compile(
    "|".join((r"pypi\." + "org", "python" + "hosted", r"registry\." + "npmjs", r"deb\." + "debian", r"(?<![\w.])/(work|root)" + "/"))
)

IMPORT_EVERY_MODULE = """
import importlib, json, pkgutil, sys
found = {}
for name in sys.argv[2:]:
    package = importlib.import_module(f"jaxrl.{name}")
    names = [package.__name__] + [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    for module in names:
        importlib.import_module(module)
        for library in sys.argv[1].split(","):
            if library in sys.modules:
                found.setdefault(library, module)
print(json.dumps(found))
"""


def tracked_files() -> list[Path]:
    """Files that git knows or would add; all text files of the tree where there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs git and a checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def test_no_module_of_the_asyncio_arm_brings_jax_into_the_process() -> None:
    """One fresh process imports every module of every package, in order, and names the first module that brought a library in."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERY_MODULE, ",".join(ARRAY_LIBRARIES), *ASYNCIO_ARM],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_every_mesh_is_built_in_one_place() -> None:
    builders = [p for p in MODULES if re.search(r"\bmake_mesh\(|\bMesh\(|mesh_utils", p.read_text(encoding="utf-8"))]
    assert [str(p.relative_to(ROOT)) for p in builders] == ["jaxrl/models/mesh.py"]


def test_no_module_is_a_drawer() -> None:
    assert [str(p) for p in MODULES if p.stem.strip("_") in ("utils", "util", "common", "helpers", "helper", "misc")] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_has_a_docstring_and_keeps_to_the_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no module docstring"
    assert text.count("\n") <= MAX_FILE_LINES
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f"{f.name}, line {f.lineno}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_the_tree_names_no_registry_and_no_path_of_a_machine() -> None:
    hits = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        hits += [f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in FORBIDDEN_TEXT.finditer(text)]
    assert hits == []
