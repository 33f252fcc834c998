"""The compile cache: XLA's programs on disk, so that a process need not compile what an earlier one did.

In: whether and where. Out: JAX's persistent cache pointed at a folder of this kind of machine. A cache
that cannot be used is worth one warning and no more: what it lacks is compiled. Only what starts a run calls this, never an import.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from stat import S_ISREG

import jax

logger = logging.getLogger(__name__)

MIN_COMPILE_S = 0.1
"""Programs that compile faster than this are not kept: reading them would save nothing."""

MAX_BYTES = 10 * 2**30
"""When a run starts, the oldest programs go until no more than this is left."""

_JAX_ERROR = "persistent compilation cache entry"
"""In every warning that JAX gives when it cannot read or write one program."""


def use_compile_cache(*, is_on: bool = True, directory: str | None = None) -> Path | None:
    """Keep the programs that this process compiles from now on, and use those that are kept already.

    Call it before the first compilation. The folder has a part for each release of jaxlib and each set of processor features, because
    a program that was compiled for another processor may end the process. A cache that was set up by other means, such as
    JAX_COMPILATION_CACHE_DIR, stays as it is, and JAX_ENABLE_COMPILATION_CACHE=false is obeyed.

    Args:
      is_on: False does nothing.
      directory: where; None means the user's cache folder.

    Returns:
      The folder in use; None where there is none: switched off, set up elsewhere, or not writable, which is logged as a warning.
    """
    if not is_on or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    try:
        folder = cache_folder(directory)
    except RuntimeError as error:  # a user without a home, as in many containers
        _warn_of_no_cache(directory or "~/.cache", error)
        return None
    in_use = jax.config.values["jax_compilation_cache_dir"]
    if in_use == str(folder):
        return folder
    if in_use is not None:
        logger.info("compiled programs are kept in %s, as JAX was told already", in_use)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _drop_oldest(folder)
    except OSError as error:
        _warn_of_no_cache(folder, error)
        return None
    logging.getLogger("py.warnings").addFilter(_OnceForDamage(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _warn_of_no_cache(folder: str | Path, error: Exception) -> None:
    logger.warning(
        "the compile cache %s cannot be used, so every program is compiled: %s; set `run.compile_cache_dir` to a folder of yours, or "
        "`run.compile_cache`=false",
        folder,
        error,
    )


def cache_folder(directory: str | None = None) -> Path:
    """Return where programs for this machine are kept."""
    if directory is not None:
        root = Path(directory).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl" / "xla"
    return root / f"jaxlib-{metadata.version('jaxlib')}-{platform.machine()}-{_processor_features()}"


def _processor_features() -> str:
    """Return a short hash of what the processor can do; programs of the CPU, and the host's part of others, are made for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # `flags` on x86, `Features` on Arm; one processor speaks for all.
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:12]


def _drop_oldest(folder: Path) -> None:
    """Keep `MAX_BYTES` of files at most; another process may delete the same ones at the same time."""
    entries: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                entries.append((stat.st_mtime, stat.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


class _OnceForDamage(logging.Filter):
    """Lets the first of JAX's warnings about single programs through, worded for a person, and no other."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Reword the first such record; drop the others."""
        text = record.getMessage()
        if _JAX_ERROR not in text:
            return True
        if self._is_said:
            return False
        self._is_said = True
        reason = text.partition(f"{_JAX_ERROR} for ")[2].partition("\n")[0] or text
        record.msg = "the compile cache %s is damaged or full, and what it cannot give is compiled: %s; delete the folder to be rid of this"
        record.args = (self._folder, reason)
        return True
