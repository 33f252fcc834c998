"""Checkpoints: one atomic commit of the trainer's arrays and of every other part of the run, as bytes.

In: a step, a pytree of arrays and named bytes. Out: `DIRECTORY/step_NNNNNN/` with `state/` (arrays, by orbax) and
`parts/` (one file per part, and `manifest.json`), or no such directory at all: orbax writes beside it and renames at
the end. A process killed at any moment leaves the previous checkpoint the newest complete one. It does not know what
the parts mean, and never decides when to save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxrl.errors import CheckpointError
from jaxrl.models.mesh import replicated

logger = logging.getLogger(__name__)

STATE, PARTS, MANIFEST = "state", "parts", "manifest.json"
"""Items of a checkpoint, and the file among the parts that lists them all."""
_COMPLETE_NAME = re.compile(r"step_(\d{6,})")
_LEFTOVER_NAME = re.compile(r"step_\d{6,}(\.deleting|\.orbax-checkpoint-tmp.*)?")
"""What a killed save or deletion may leave; anything else in the folder, such as a copy that somebody made, is not ours."""


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint.

    Example:
      >>> step_name(12)
      'step_000012'
    """
    return f"step_{step:06d}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps that have a complete checkpoint in a directory, which need not exist, oldest first."""
    return sorted(step for path in _entries(directory) if (step := _complete_step(path)) is not None)


def free_bytes(directory: Path) -> int:
    """Return the bytes that can still be written into a directory."""
    return shutil.disk_usage(directory).free


@dataclasses.dataclass
class _PartsSave(ocp.args.CheckpointArgs):
    parts: Mapping[str, bytes]


@dataclasses.dataclass
class _PartsRestore(ocp.args.CheckpointArgs):
    pass


class _PartsHandler(ocp.CheckpointHandler):
    """Writes each part as a file of its own, so that a person can look at it."""

    def save(self, directory: Path, args: _PartsSave) -> None:
        if jax.process_index() == 0:
            for name, data in args.parts.items():
                (directory / name).write_bytes(data)

    def restore(self, directory: Path, args: _PartsRestore | None = None) -> dict[str, bytes]:
        names = json.loads((directory / MANIFEST).read_text())["parts"]
        return {name: (directory / name).read_bytes() for name in names}


ocp.args.register_with_handler(_PartsHandler, for_save=True)(_PartsSave)
ocp.args.register_with_handler(_PartsHandler, for_restore=True)(_PartsRestore)


def _orbax() -> ocp.Checkpointer:
    """Orbax's writer and reader of one checkpoint directory; used as a context."""
    # With replica-parallel saving orbax slices replicated arrays on the device, which compiles dozens of small programs
    # in the first save.
    arrays = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=arrays)
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**{STATE: state, PARTS: _PartsHandler()}))


class Checkpointer:
    """Saves, finds and restores the checkpoints of one run folder; `save` and `restore` belong on the device thread."""

    def __init__(
        self, directory: Path, keep_last: int, mesh: Mesh, *, free: Callable[[Path], int] = free_bytes
    ) -> None:
        """Say where checkpoints are; touches nothing.

        Args:
          directory: holds one `step_NNNNNN` per checkpoint; made by the first save.
          keep_last: how many of the newest complete checkpoints a save leaves.
          mesh: where leaves of a restored state go whose target says nothing (replicated).
          free: says how many bytes a directory can still take.
        """
        self.directory = Path(directory).absolute()
        self._keep_last = keep_last
        self._mesh = mesh
        self._free = free

    def complete_steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, oldest first, from a scan of the directory."""
        return complete_steps(self.directory)

    def latest_complete(self) -> int | None:
        """Return the step of the newest complete checkpoint, and log what was chosen and what was passed over.

        Returns:
          The step, or None if there is no complete checkpoint.
        """
        complete = self.complete_steps()
        ignored = sorted(
            path.name for path in self._entries() if path.name.startswith("step_") and _complete_step(path) is None
        )
        chosen = complete[-1] if complete else None
        logger.info(
            "checkpoints in %s: chose %s of %s; ignored as incomplete: %s",
            self.directory,
            "none" if chosen is None else step_name(chosen),
            complete,
            ", ".join(ignored) or "none",
        )
        return chosen

    def save(self, step: int, state: Any, parts: Mapping[str, bytes]) -> Path:
        """Commit a step, then delete all but the newest `keep_last` complete checkpoints.

        Args:
          step: the step that `state` stands at; one that is complete already is left as it is.
          state: pytree of arrays.
          parts: bytes of the other parts of the run, by name (a plain file name).

        Returns:
          The checkpoint's directory.

        Raises:
          CheckpointError: the disk is full, the directory cannot be written, or writing failed; no earlier checkpoint
            is lost.
        """
        path = self.directory / step_name(step)
        if _complete_step(path) is not None:
            return path
        leaves = _named_leaves(state)
        needed = sum(leaf.nbytes for leaf in leaves.values()) + sum(map(len, parts.values()))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_incomplete()
            if self._free(self.directory) < needed:
                raise OSError("not enough space on the disk")
            manifest = _manifest(step, leaves, parts)
            with _orbax() as writer:
                items = {STATE: ocp.args.PyTreeSave(leaves), PARTS: _PartsSave({**parts, MANIFEST: manifest})}
                writer.save(path, args=ocp.args.Composite(**items))
        # Whatever orbax or the disk raises means the same to the caller: this commit did not happen.
        except Exception as error:
            raise CheckpointError(self._failure(path, needed, error)) from error
        self._retain()
        logger.info("saved %s (%.1f MiB)", path, needed / 2**20)
        return path

    def restore(self, step: int, abstract_state: Any, *, is_part: bool = False) -> tuple[Any, dict[str, bytes]]:
        """Read a complete checkpoint back, bit for bit, onto any mesh.

        Args:
          step: which checkpoint.
          abstract_state: pytree of ShapeDtypeStructs, the structure to fill; a leaf without a sharding is replicated.
          is_part: it is some of the state, such as `{"params": ...}`; the rest is not read.

        Returns:
          The state, laid out as asked, and the parts by name.

        Raises:
          CheckpointError: there is no such complete checkpoint, it is damaged, or its arrays are not those of
            `abstract_state`.
        """
        path = self.directory / step_name(step)
        if _complete_step(path) is None:
            raise CheckpointError(
                f"no complete checkpoint of step {step} in {self.directory}; complete are {self.complete_steps()}"
            )
        targets = {
            name: leaf
            if leaf.sharding is not None
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(self._mesh))
            for name, leaf in _named_leaves(abstract_state).items()
        }
        manifest = json.loads((path / PARTS / MANIFEST).read_text())
        saved = manifest["state"]
        _check_same_arrays(path, {name: saved[name] for name in saved if name in targets} if is_part else saved, targets)
        try:
            with _orbax() as reader:
                restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
                arrays = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=is_part)
                items = {STATE: arrays, PARTS: _PartsRestore()}
                restored = reader.restore(path, args=ocp.args.Composite(**items))
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read ({error}); choose another of {self.complete_steps()}"
            ) from error
        for name, expected in manifest["parts"].items():
            if _digest(restored[PARTS][name]) != expected["sha256"]:
                raise CheckpointError(
                    f"part {name!r} of checkpoint {path} is damaged; choose another of {self.complete_steps()}"
                )
        logger.info("restored %s", path)
        treedef = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(treedef, [restored[STATE][name] for name in targets]), dict(restored[PARTS])

    def _entries(self) -> list[Path]:
        return _entries(self.directory)

    def _remove_incomplete(self) -> None:
        """Delete what a killed save or deletion left behind; a run folder has one writer, so nobody is still at it."""
        for path in self._entries():
            if _LEFTOVER_NAME.fullmatch(path.name) and path.is_dir() and _complete_step(path) is None:
                shutil.rmtree(path)

    def _retain(self) -> None:
        for step in self.complete_steps()[: -self._keep_last]:
            path = self.directory / step_name(step)
            try:
                # Renamed first: a directory that lost some of its files must not be taken for a complete one.
                shutil.rmtree(path.rename(path.with_name(path.name + ".deleting")))
            except OSError as error:
                logger.warning("could not delete old checkpoint %s: %s", path, error)

    def _failure(self, path: Path, needed: int, error: Exception) -> str:
        existing = next(parent for parent in (self.directory, *self.directory.parents) if parent.is_dir())
        complete = self.complete_steps()
        kept = (
            f"{step_name(complete[-1])} is still the newest complete checkpoint"
            if complete
            else "no earlier checkpoint existed"
        )
        return (
            f"checkpoint {path.name} could not be written into {self.directory}: {error}; {needed} bytes needed, "
            f"{self._free(existing)} free. Nothing was lost: the state is still in memory and {kept}. "
            "Free some space or make the directory writable"
        )


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _complete_step(path: Path) -> int | None:
    """The step of a complete checkpoint directory; None for anything else."""
    match = _COMPLETE_NAME.fullmatch(path.name)
    if match is None or not path.is_dir() or not ocp.utils.is_checkpoint_finalized(path):
        return None
    try:
        parts = json.loads((path / PARTS / MANIFEST).read_text())["parts"]
        is_whole = (path / STATE).is_dir() and all(
            (path / PARTS / name).stat().st_size == part["bytes"] for name, part in parts.items()
        )
    except (OSError, ValueError, KeyError):
        return None
    return int(match[1]) if is_whole else None


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by dotted path, in tree order: names in a checkpoint do not depend on our classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(step: int, leaves: Mapping[str, jax.Array], parts: Mapping[str, bytes]) -> bytes:
    content = {
        "step": step,
        "state": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()},
        "parts": {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in parts.items()},
    }
    return json.dumps(content, indent=1).encode()


def _check_same_arrays(path: Path, saved: Mapping[str, Any], targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    wanted = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in targets.items()}
    differing = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"checkpoint {path} is of another model, optimizer or `trainer.param_dtype`: {len(differing)} arrays "
            f"differ, the first is {name!r}: saved {saved.get(name, 'nothing')}, this run has "
            f"{wanted.get(name, 'nothing')}"
        )
