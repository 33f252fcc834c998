"""What `--checkpoint DIR` means: a model directory, a run, or one step of a run.

In: a path. Out: which of the three it is. It looks at names alone; what is in the files is for those who read them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jaxrl.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
_STEP = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    run_dir: Path
    """The run's folder, with its config.toml."""
    step: int | None
    """Which step; None is the newest complete one."""


def run_checkpoint(path: str) -> RunCheckpoint | None:
    """Return the checkpoint of a run that a path means; None if it is a model's directory, or a name on the hub.

    Raises:
      ConfigError: it is a part of a run that does not say which checkpoint, or a run without any.
    """
    given = Path(path).expanduser()
    match = _STEP.fullmatch(given.name)
    run_dir = given.absolute().parent.parent
    if match is not None and (given.is_dir() or (run_dir / CHECKPOINTS).is_dir()):
        if given.absolute().parent.name != CHECKPOINTS or not (run_dir / "config.toml").is_file():
            raise ConfigError(
                f"`--checkpoint` {path}: expected it in the `{CHECKPOINTS}` of a run's folder, whose config.toml says which model it is; a "
                "checkpoint that was moved is evaluated from its own run"
            )
        return RunCheckpoint(run_dir, int(match[1]))
    if given.name == CHECKPOINTS and (given.absolute().parent / "config.toml").is_file():
        return RunCheckpoint(given.absolute().parent, None)
    if (given / "config.toml").is_file() and not (given / "config.json").is_file():
        if not (given / CHECKPOINTS).is_dir():
            raise ConfigError(
                f"`--checkpoint` {path}: the run has no checkpoint yet; a smaller `trainer.checkpoint.every_n_steps` saves sooner"
            )
        return RunCheckpoint(given, None)
    return None


def newest_step_name(run_dir: Path) -> str | None:
    """Return the name of a run's newest checkpoint, as far as names tell; None without any.

    Whether it is complete is for those who read it to say.
    """
    folder = run_dir / CHECKPOINTS
    return max((path.name for path in folder.iterdir() if _STEP.fullmatch(path.name)), default=None) if folder.is_dir() else None
