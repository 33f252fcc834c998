"""The run folder as such: whether it may be used, its configuration, its log, and how to go on with it.

In: a configuration or the folder's path. Out: files and sentences. What the other files of the folder hold is the business of
those who write them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrl.config.dump import dump_toml
from jaxrl.config.run import RunConfig
from jaxrl.errors import ConfigError


def check_run_folder(run_dir: Path, *, resume: bool, has_checkpoint: Callable[[], bool]) -> None:
    """Refuse to write over a run.

    Args:
      run_dir: the folder; it need not exist.
      resume: the run in it is to go on.
      has_checkpoint: says whether there is a complete one, so that the run could go on.

    Raises:
      ConfigError: the folder holds a run and `resume` is False.
    """
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    holds_run = (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    if holds_run and not resume:
        if has_checkpoint():
            ways = f"go on with it ({resume_command(run_dir)}), delete it, or choose another `run.name` or `run.output_dir`"
        else:
            ways = "no step of it is saved, so delete it, or choose another `run.name` or `run.output_dir`"
        raise ConfigError(f"the folder {run_dir} holds a run already; {ways}")


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Make the run folder, and keep every other process from writing into it until the block, or this process, ends.

    Raises:
      ConfigError: the folder cannot be written, or another process is writing into it.
    """
    with _must_be_writable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir, os.O_RDONLY)
    try:
        # Some network file systems know no locks; two processes in one folder go unnoticed there.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is writing into the run folder {run_dir}; wait until it ends, stop it, or choose another "
                    "`run.name` or `run.output_dir`"
                ) from None
        yield
    finally:
        os.close(folder)


def write_config(config: RunConfig) -> None:
    """Write the resolved configuration into the run folder.

    Raises:
      ConfigError: it cannot be written.
    """
    with _must_be_writable(config.run_dir):
        (config.run_dir / "config.toml").write_text(dump_toml(config), encoding="utf-8")


@contextlib.contextmanager
def _must_be_writable(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the run folder {run_dir} cannot be written: {error}; set `run.output_dir` to a folder that can") from error


def eval_paths(run_dir: Path, step: int, env_name: str) -> tuple[Path, Path]:
    """Return the files of an evaluation: its rows, and its result, which is written last."""
    rows = run_dir / "evals" / f"step_{step:06d}.{env_name}.jsonl"
    return rows, rows.with_suffix(".json")


def resume_command(run_dir: Path) -> str:
    """Return the command that goes on with a run."""
    return shlex.join([sys.executable, "-m", "jaxrl.train", "--resume", str(run_dir)])
