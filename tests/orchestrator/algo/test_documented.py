"""What docs/algorithms.md says of the algorithms is true of their code."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.orchestrator import OrchestratorConfig
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES, Algorithm

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in BLOCK.finditer(TEXT)]
SOURCES = ("jaxrl/orchestrator/algo/rloo.py", "jaxrl/config/algorithm.py", "jaxrl/orchestrator/algo/__init__.py")


def test_the_table_has_every_algorithm_with_its_component_and_its_hook():
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| `(\w+)` \|", TEXT, re.MULTILINE)
    listeners = {s.model_fields["type"].default for s in get_args(get_args(AlgorithmConfig)[0]) if s.learns_from_observations}
    components = {name: cls.action_loss_type + (", ce" if name in listeners else "") for name, cls in ALGORITHM_CLASSES.items()}
    hooks = {
        name: next(hook for hook in ("score_rollout", "score_group") if getattr(cls, hook) is not getattr(Algorithm, hook))
        for name, cls in ALGORITHM_CLASSES.items()
    }
    assert sorted(rows) == sorted((name, components[name], hooks[name]) for name in ALGORITHM_CLASSES)


def test_the_example_of_an_algorithm_is_the_real_source_and_has_fewer_than_30_lines():
    shown = [code for language, code in BLOCKS if language == "py"]
    for path, code in zip(SOURCES, shown, strict=True):
        assert code in (ROOT / path).read_text(encoding="utf-8"), path
    assert shown[0] == (ROOT / SOURCES[0]).read_text(encoding="utf-8"), "the whole module"
    assert sum(bool(line.strip()) for code in shown for line in code.splitlines()) < 30


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "toml"])
def test_the_settings_that_it_shows_are_accepted(code):
    settings = tomllib.loads(code)["orchestrator"]
    OrchestratorConfig.model_validate({"model": {"name": "m"}, "train": {"env": [{"type": "reverse_text"}]}} | settings)
