"""The pipeline and the trainer ask objects and read streams; they never look at the type of an algorithm or of an environment.

What the names of the loss components (`rl`, `ce`, `ref_kl`) say is another thing: they name the terms of the objective.
"""

import re
from pathlib import Path
from typing import get_args

import pytest

import jaxrl
from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.env import EnvConfig
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES
from jaxrl.types import COMPONENTS

ROOT = Path(jaxrl.__file__).parent
BLIND = [path for folder in ("orchestrator", "batching", "trainer", "losses") for path in sorted((ROOT / folder).glob("*.py"))]
ENV_CLASSES = get_args(get_args(EnvConfig)[0])
ALGORITHM_CONFIGS = get_args(get_args(AlgorithmConfig)[0])
TYPES = {
    *ALGORITHM_CLASSES,
    *(cls.__name__ for cls in ALGORITHM_CLASSES.values()),
    *(cls.model_fields["type"].default for cls in (*ENV_CLASSES, *ALGORITHM_CONFIGS)),
    *(cls.__name__ for cls in (*ENV_CLASSES, *ALGORITHM_CONFIGS)),
}


def words_of(source: str) -> set[str]:
    """Return every word of a source, comments and strings included; `sft` is none of `shift`, and one of `"sft"`."""
    return set(re.findall(r"\w+", source))


def test_the_files_that_must_be_blind_and_every_registered_type_are_looked_at():
    names = {f"{path.parent.name}/{path.name}" for path in BLIND}
    pipeline = {f"orchestrator/{name}.py" for name in ("dispatcher", "sink", "batcher", "orchestrator", "shipping", "filters")}
    assert pipeline | {"batching/packer.py", "trainer/step.py", "trainer/loop.py", "losses/total.py"} <= names
    assert {"grpo", "GRPO", "opd", "SFTConfig", "reverse_text", "ReverseTextEnvConfig"} <= TYPES
    assert {cls.model_fields["type"].default for cls in ALGORITHM_CONFIGS} == set(ALGORITHM_CLASSES)
    assert not TYPES & set(COMPONENTS)
    assert words_of('if env.algo.type == "sft":') & TYPES == {"sft"}


@pytest.mark.parametrize("path", BLIND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_type_of_algorithm_or_environment_is_named(path):
    source = path.read_text(encoding="utf-8")
    assert words_of(source) & TYPES == set()
    assert not re.search(r"isinstance\([^)]*\b(algorithm|environment|algo)\b", source)
    assert not re.search(r"\b(algo|algorithm|environment|env)(\.config)?\.type\b", source)


@pytest.mark.parametrize("path", [path for path in BLIND if path.name != "sources.py"], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_but_the_sources_themselves_knows_who_writes_the_replies(path):
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(Policy|Frozen|Demonstration)Source\b|isinstance\([^)]*\bsource\b|\.source\s*[=!]=", source)
