"""What a run ran on: packages, the commit of the code, Python, the platform and the devices, for `environment.json`.

In: device names as text, since this package never imports JAX. Out: a JSON value. Environment variables, host names and
user names are not recorded.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxrl

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "transformers", "tokenizers", "safetensors", "pydantic",
    "msgspec", "reasoning-gym",
)  # fmt: skip
"""Packages whose version can change a result."""


def describe_environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the run runs on.

    Args:
      devices: one name per device, such as `TFRT_CPU_0`.

    Returns:
      A JSON object with `jaxrl, commit, is_modified, started, python, platform, num_cpus, devices, packages`. `commit`
      and `is_modified` are None when the code does not stand in a git checkout.
    """
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "jaxrl": jaxrl.__version__,
        "commit": commit,
        "is_modified": None if changes is None else bool(changes),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "devices": list(devices),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return the output of git on the checkout that holds this package; None where there is none."""
    root = Path(jaxrl.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
