"""Which rollouts of a run to look at: the file of a step, and the best, the worst, the failed or the first of it.

In: a run folder or a file, and what is asked for. Out: records of the rollout log. Files are read a line at a time, and only what is
chosen is kept. It draws nothing.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl.errors import ConfigError
from jaxrl.monitors.jsonl import iterate_lines

Order = Literal["best", "worst", "errors"]
Record = Mapping[str, Any]

EPISODES = "episodes.jsonl"
"""The rows of an evaluation, in its folder."""
_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl")
_WORDS = {"best": ", highest reward first", "worst": ", lowest reward first", "errors": " that failed", None: ""}


@dataclass(frozen=True, slots=True)
class Choice:
    """Rollouts of one file."""

    records: list[Record]
    """Those that were chosen."""
    order: Order | None
    """What was asked for; None for the order of the file."""
    env_name: str | None
    """The environment that was asked for; None for all."""
    task_id: str | None
    """The task that was asked for; None for all."""
    num_rollouts: int
    """How many the file has."""
    num_matching: int
    """How many of them could have been chosen."""
    env_names: list[str]
    """The environments that the file has rollouts of."""

    def title(self, path: Path) -> str:
        """Return a line over the chosen rollouts."""
        more = ", --num shows more" if len(self.records) < self.num_matching else ""
        return f"{path}: {len(self.records)} of {self.num_rollouts} rollouts{self._of_what()}{_WORDS[self.order]}{more}"

    def nothing(self, path: Path) -> str:
        """Say why nothing was chosen, and what to do."""
        if not self.num_rollouts:
            return f"`{path}` holds no rollouts (yet); --step N shows an earlier step"
        if self.env_name is not None and self.env_name not in self.env_names:
            return f"`{path}` has no rollout of env {self.env_name!r}; it has rollouts of {', '.join(map(repr, self.env_names))}"
        if self.order is None:
            return f"of the {self.num_rollouts} rollouts in `{path}`, none is{self._of_what()}; --step N shows another step"
        what = "failed" if self.order == "errors" else "has a reward"
        return f"of the {self.num_rollouts} rollouts in `{path}`, none{self._of_what()} {what}; --step N shows another step"

    def _of_what(self) -> str:
        of_env = f" of env {self.env_name!r}" if self.env_name is not None else ""
        return of_env + (f" of task {self.task_id!r}" if self.task_id is not None else "")


def rollout_file(path: Path, step: int | None = None) -> Path:
    """Return the file of a step.

    Args:
      path: a run folder, the folder of its rollouts, that of an evaluation, or a file.
      step: 1-based; None takes the newest.

    Raises:
      ConfigError: there is no such path, no rollouts in it, or no such step.
    """
    if path.is_file():
        if step is not None:
            raise ConfigError(f"`{path}` is a file, of one step; --step N needs a run folder")
        return path
    if not path.exists():
        raise ConfigError(f"there is no `{path}`; give a run folder, such as runs/RUN_NAME, or a file in its `rollouts`")
    if (path / EPISODES).is_file():
        if step is not None:
            raise ConfigError(f"`{path}` is the folder of one evaluation, of one step; --step N needs a run folder")
        return path / EPISODES
    folders = [folder for folder in (path / "rollouts", path) if folder.is_dir()]
    files = {int(match[1]): file for folder in reversed(folders) for file in folder.iterdir() if (match := _STEP_FILE.fullmatch(file.name))}
    if not files:
        raise ConfigError(
            f"`{path}` holds no rollouts: `{path / 'rollouts'}` has no file step_NNNNNN.jsonl, and there is no `{path / EPISODES}`; it is "
            "no folder of a run or an evaluation, nothing was played in it yet, or `monitors.rollouts` was false"
        )
    step = max(files) if step is None else step
    if step not in files:
        raise ConfigError(f"`{path}` has no rollouts of step {step}; it has steps {min(files)} to {max(files)}")
    return files[step]


def chosen(path: Path, *, order: Order | None = None, env_name: str | None = None, task_id: str | None = None, num: int = 3) -> Choice:
    """Read a file and choose from it.

    Args:
      path: a file of rollouts, or of an evaluation.
      order: `best` and `worst` sort by reward and leave out what has none, `errors` takes what failed; None takes the first.
      env_name: of this environment only.
      task_id: of this task only.
      num: how many at most.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not what was expected; the message says in which line.
    """
    counts = {"rollouts": 0, "matching": 0}
    env_names: set[str] = set()

    def matching() -> Iterator[tuple[float, int, Record]]:
        for index, record in enumerate(iterate_lines(path)):
            if not isinstance(record, dict) or "messages" not in record:
                raise ValueError(f"line {index + 1} is no rollout; expected an object with `messages`, as in rollouts/step_NNNNNN.jsonl")
            counts["rollouts"] += 1
            env_names.add(str(record.get("env")))
            if env_name is not None and record.get("env") != env_name:
                continue
            task = record.get("task") or {}  # an evaluation's rows have only the `task_id`
            if task_id is not None and task_id != task.get("id", record.get("task_id")):
                continue
            reward = record.get("reward")
            if order is not None and (record.get("error") if order == "errors" else reward) is None:
                continue
            counts["matching"] += 1
            yield {"best": -1.0, "worst": 1.0}.get(str(order), 0.0) * (reward or 0.0), index, record

    # Of equal rewards the first of the file; the index also keeps records, which have no order, from being compared.
    records = [record for _, _, record in heapq.nsmallest(num, matching(), key=lambda found: found[:2])]
    return Choice(records, order, env_name, task_id, counts["rollouts"], counts["matching"], sorted(env_names))
