"""What the doctor is shown: the small run, and model directories with something wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl.config.run import RunConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding
from tests.e2e.runs import ROOT, small_run

MODEL = ROOT / "configs/quickstart/start_model"


def config(*overrides: str) -> RunConfig:
    """Return the small run."""
    return small_run(Path("unused"), *overrides)


def examine(check: Callable[[Examination], Finding], *overrides: str) -> Finding:
    """Run one check on the small run."""
    with Examination(config(*overrides)) as exam:
        return check(exam)


class ModelDir:
    """A copy of the start model that a test may damage."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(shutil.copytree(MODEL, directory / "model"))

    @property
    def override(self) -> str:
        """The setting that names it."""
        return f"--orchestrator.model.name={self.path}"

    def edit_json(self, name: str, **values: Any) -> None:
        """Set keys of a JSON file, which need not exist."""
        file = self.path / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(content | values))

    def edit_template(self, *replaced: tuple[str, str], before: str = "") -> None:
        """Replace parts of the chat template and put something before it."""
        file = self.path / "chat_template.jinja"
        text = file.read_text()
        for old, new in replaced:
            assert old in text, old
            text = text.replace(old, new)
        file.write_text(before + text)

    def edit_tensors(self, **tensors: np.ndarray | None) -> dict[str, np.ndarray]:
        """Set tensors of the weights, or remove those that are None; give all of them back."""
        file = self.path / "model.safetensors"
        kept = {name: array for name, array in (load_file(file) | tensors).items() if array is not None}
        save_file(kept, file, metadata={"format": "pt"})
        return kept

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the weights by name."""
        return load_file(self.path / "model.safetensors")


def lines_of(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield level, check and finding of each line that the command printed."""
    for line in text.splitlines():
        level, name, *rest = line.split(maxsplit=2)
        yield level, name, rest[0]
