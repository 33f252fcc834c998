"""The pipeline asks each environment's objects; it never looks at the type of an algorithm or of an environment."""

import re
from pathlib import Path
from typing import get_args

import pytest

import jaxrl.orchestrator
from jaxrl.config.env import EnvConfig
from jaxrl.orchestrator.algo import ALGORITHM_CLASSES

PIPELINE = sorted(Path(jaxrl.orchestrator.__file__).parent.glob("*.py"))
ENV_CLASSES = get_args(get_args(EnvConfig)[0])
TYPES = [
    *ALGORITHM_CLASSES,
    *(cls.__name__ for cls in ALGORITHM_CLASSES.values()),
    *(cls.model_fields["type"].default for cls in ENV_CLASSES),
    *(cls.__name__ for cls in ENV_CLASSES),
]


def test_the_pipelines_files_are_looked_at():
    assert {"dispatcher.py", "sink.py", "batcher.py", "orchestrator.py"} <= {path.name for path in PIPELINE}
    assert {"grpo", "GRPO", "reverse_text", "ReverseTextEnvConfig"} <= set(TYPES)


@pytest.mark.parametrize("path", PIPELINE, ids=lambda path: path.name)
def test_no_type_of_algorithm_or_environment_is_named_in_the_pipeline(path):
    source = path.read_text()
    named = [name for name in TYPES if re.search(rf"\b{name}\b", source)]
    assert named == []
    assert not re.search(r"isinstance\([^)]*(algorithm|environment|config\.algo)", source)
