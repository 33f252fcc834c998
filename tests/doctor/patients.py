"""What the doctor is shown: the small run, and model directories with something wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding
from tests.e2e.runs import ROOT, small_run

MODEL = ROOT / "configs/quickstart/start_model"
FROM_DEMONSTRATIONS = "{type = 'sft', sampling = {source = 'demonstrations'}}"


def config(*overrides: str) -> RunConfig:
    """Return the small run."""
    return small_run(Path("unused"), *overrides)


def examine(check: Callable[[Examination], Finding], *overrides: str) -> Finding:
    """Run one check on the small run."""
    return examine_run(check, config(*overrides))


def examine_run(check: Callable[[Examination], Finding], run: RunConfig) -> Finding:
    """Run one check on a run."""
    with Examination(run) as exam:
        return check(exam)


def questions_config(
    directory: Path, rows: Sequence[dict[str, Any]], *overrides: str, env: str = "", algo: str = FROM_DEMONSTRATIONS
) -> RunConfig:
    """Return a run that asks the questions of a file with these rows, learning from their demonstrations.

    Args:
      directory: where the file is written.
      rows: one JSON object a question.
      overrides: of the command line.
      env: further settings of the environment, as TOML.
      algo: its algorithm, as a TOML value.
    """
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "run.toml").write_text(
        f"[orchestrator]\ngroup_size = 2\nmodel = {{name = '{MODEL}'}}\nsampling = {{max_tokens = 32}}\n"
        f"[[orchestrator.train.env]]\ntype = 'questions'\npath = '{directory}/rows.jsonl'\nsplit = 'all'\nalgo = {algo}\n{env}\n"
        "[inference]\nmax_model_len = 64\n[trainer]\nrow_length = 96\n"
    )
    return load_config(directory / "run.toml", list(overrides))


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


def tools_config(directory: Path, *overrides: str, env: str = "", algo: str = FROM_DEMONSTRATIONS) -> RunConfig:
    """Return a run on sums with a calculator, learning from its demonstrations; arguments as those of `questions_config`."""
    (directory / "run.toml").write_text(
        f"[orchestrator]\ngroup_size = 2\nmodel = {{name = '{MODEL}'}}\nsampling = {{max_tokens = 32}}\n"
        "[[orchestrator.train.env]]\ntype = 'tools'\ndataset = 'chain_sum'\nparameters = {max_terms = 2, max_digits = 1}\n"
        f"num_tasks = 20\ndescribe = false\nalgo = {algo}\n{env}\n"
        "[inference]\nmax_model_len = 160\n[trainer]\nrow_length = 160\n"
    )
    return load_config(directory / "run.toml", list(overrides))
