"""Checkpoints: bit-exact on any mesh, and one that was not finished never counts."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import CheckpointError
from jaxrl.models import build_mesh
from jaxrl.trainer.checkpoint import Checkpointer, step_name
from tests.flags import FAST_COMPILATION
from tests.trainer.tiny import to_host

PARTS = {"orchestrator": b"\x00queued draws\xff"}


def one_device_mesh():
    return build_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path / "checkpoints", keep_last=2, mesh=one_device_mesh())


def small_state(value=0.0):
    return {
        "params": {"w": jnp.full((4, 3), value)},
        "moments": (jnp.arange(5.0), jnp.bfloat16(1.5)),
        "step": jnp.int32(7),
    }


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_trees_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, to_host(found), to_host(expected))
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(lambda leaf: leaf.dtype, expected)


def test_a_restored_state_and_its_parts_are_the_saved_ones_bit_for_bit(checkpointer):
    state = small_state(np.float32(np.nan)) | {"tiny": jnp.float32(1e-45)}
    path = checkpointer.save(3, state, PARTS)
    assert (
        path.name == step_name(3) == "step_000003"
        and (path / "parts" / "orchestrator").read_bytes() == PARTS["orchestrator"]
    )
    restored, parts = checkpointer.restore(3, abstract(state))
    assert_trees_equal(restored, state)
    assert parts == PARTS


def test_a_part_of_the_state_is_restored_without_the_rest_and_what_is_not_there_is_named(checkpointer):
    state = small_state(2.5)
    checkpointer.save(3, state, PARTS)
    restored, _ = checkpointer.restore(3, abstract({"params": state["params"]}), is_part=True)
    assert_trees_equal(restored, {"params": state["params"]})
    with pytest.raises(CheckpointError, match=r"1 arrays differ, the first is 'params\.v': saved nothing"):
        checkpointer.restore(3, abstract({"params": {"v": jnp.zeros(2)}}), is_part=True)


def test_the_newest_complete_checkpoints_are_kept_whoever_wrote_them(checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, small_state(), PARTS)
    assert checkpointer.complete_steps() == [2, 3]
    after_restart = Checkpointer(checkpointer.directory, 1, one_device_mesh())
    after_restart.save(4, small_state(), PARTS)
    assert sorted(path.name for path in checkpointer.directory.iterdir()) == ["step_000004"]


def test_a_copy_that_somebody_made_in_the_folder_is_never_deleted(checkpointer):
    best = shutil.copytree(checkpointer.save(1, small_state(), PARTS), checkpointer.directory / "step_000001_best")
    (checkpointer.directory / "step_notes.txt").write_text("mine")
    for step in (2, 3, 4):
        checkpointer.save(step, small_state(), PARTS)
    assert checkpointer.complete_steps() == [3, 4]
    assert (best / "parts" / "orchestrator").is_file() and (checkpointer.directory / "step_notes.txt").is_file()


def test_a_step_that_is_complete_is_not_written_again(checkpointer):
    path = checkpointer.save(1, small_state(), PARTS)
    written = path.stat().st_mtime_ns
    assert checkpointer.save(1, small_state(9.0), {"orchestrator": b"other"}) == path
    assert path.stat().st_mtime_ns == written and checkpointer.restore(1, abstract(small_state()))[1] == PARTS


def test_the_choice_is_logged_with_what_was_passed_over(checkpointer, caplog):
    assert checkpointer.latest_complete() is None
    checkpointer.save(1, small_state(), PARTS)
    broken = checkpointer.save(2, small_state(), PARTS)
    (broken / "parts" / "orchestrator").unlink()
    (checkpointer.directory / "step_000009.orbax-checkpoint-tmp").mkdir()
    (checkpointer.directory / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO, "jaxrl"):
        assert checkpointer.latest_complete() == 1
    assert (
        "chose step_000001 of [1]; ignored as incomplete: step_000002, step_000009.orbax-checkpoint-tmp" in caplog.text
    )


@pytest.mark.parametrize("damage", ["manifest.json", "orchestrator"])
def test_a_checkpoint_that_lost_a_part_or_some_bytes_of_it_is_not_complete(checkpointer, damage):
    checkpointer.save(1, small_state(), PARTS)
    part = checkpointer.save(2, small_state(), PARTS) / "parts" / damage
    part.write_bytes(part.read_bytes()[:-1])
    assert checkpointer.complete_steps() == [1]


def test_a_part_with_changed_bytes_is_refused(checkpointer):
    part = checkpointer.save(2, small_state(), PARTS) / "parts" / "orchestrator"
    part.write_bytes(b"\x01" + part.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"part 'orchestrator' .* is damaged"):
        checkpointer.restore(2, abstract(small_state()))


def test_a_missing_step_says_which_are_complete(checkpointer):
    checkpointer.save(4, small_state(), PARTS)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 5 .*complete are \[4\]"):
        checkpointer.restore(5, abstract(small_state()))


def test_arrays_of_another_shape_precision_or_name_are_refused_by_name(checkpointer):
    checkpointer.save(1, small_state(), PARTS)
    target = abstract(small_state())
    target["params"]["w"] = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"1 arrays differ, the first is 'params.w': saved \[\[4, 3\], 'float32'\]"
    ):
        checkpointer.restore(1, target)
    target["params"] = {"other": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"2 arrays differ, the first is 'params\.other': saved nothing"):
        checkpointer.restore(1, target)


def test_a_full_disk_is_said_with_the_bytes_needed_and_free_and_loses_nothing(checkpointer):
    state = {"w": jnp.zeros(1000)}
    checkpointer.save(1, state, PARTS)
    full = Checkpointer(checkpointer.directory, 1, one_device_mesh(), free=lambda _: 4000)
    needed = 4000 + len(PARTS["orchestrator"])
    with pytest.raises(
        CheckpointError, match=rf"step_000002 .*{needed} bytes needed, 4000 free.*step_000001 is still the newest"
    ):
        full.save(2, state, PARTS)
    assert checkpointer.latest_complete() == 1
    assert checkpointer.save(2, state, PARTS).is_dir()


def test_a_directory_that_cannot_be_made_or_a_write_that_fails_is_a_checkpoint_error(tmp_path, checkpointer):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: .*no earlier checkpoint existed"):
        Checkpointer(tmp_path / "file" / "checkpoints", 1, one_device_mesh()).save(1, small_state(), PARTS)
    with pytest.raises(CheckpointError, match="step_000001 could not be written"):
        checkpointer.save(1, small_state(), {"no/such/folder": b""})
    assert checkpointer.complete_steps() == []
    checkpointer.save(1, small_state(), PARTS)
    assert [path.name for path in checkpointer.directory.iterdir()] == ["step_000001"]


# Saves step 1, then kills itself at a given file-system event of saving step 2: (audit event, end of its path).
CHILD = """
import os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxrl.config.trainer import MeshConfig
from jaxrl.models import build_mesh
from jaxrl.trainer.checkpoint import Checkpointer

directory, event, tail = sys.argv[1:]
checkpointer = Checkpointer(Path(directory), 1, build_mesh(MeshConfig(), jax.devices()[:1]))
checkpointer.save(1, {"w": jnp.full(1000, 1.0)}, {"orchestrator": b"one"})

def kill(name, args):
    if name == event and str(args[0]).endswith(tail) and "step_0" in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
checkpointer.save(2, {"w": jnp.full(1000, 2.0)}, {"orchestrator": b"two"})
"""
MOMENTS = {
    "while parts are written": ("open", "manifest.json", 1),
    "when only the arrays are finished": ("os.rename", "state.orbax-checkpoint-tmp", 1),
    "with everything written and not committed": ("os.rename", "step_000002.orbax-checkpoint-tmp", 1),
    "while the old one is deleted": ("os.rmdir", "step_000001.deleting", 2),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One directory per moment, in which a child process was killed; the children run side by side."""
    root = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION}
    children = {}
    for index, (moment, (event, tail, _)) in enumerate(MOMENTS.items()):
        command = [sys.executable, "-c", CHILD, str(root / str(index)), event, tail]
        children[moment] = (root / str(index), subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    directories = {}
    for moment, (directory, child) in children.items():
        _, errors = child.communicate(timeout=100)
        assert child.returncode == -signal.SIGKILL, f"{moment}: {errors.decode()[-2000:]}"
        directories[moment] = directory
    return directories


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_during_a_save_leaves_the_newest_complete_checkpoint_and_a_later_save_works(killed, moment):
    survivor = MOMENTS[moment][2]
    checkpointer = Checkpointer(killed[moment], 1, one_device_mesh())
    assert checkpointer.latest_complete() == survivor
    target = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    restored, parts = checkpointer.restore(survivor, target)
    np.testing.assert_array_equal(restored["w"], np.full(1000, survivor, np.float32))
    assert parts == {"orchestrator": [b"one", b"two"][survivor - 1]}
    checkpointer.save(survivor + 1, restored, {"orchestrator": b"later"})
    assert [path.name for path in killed[moment].iterdir()] == [step_name(survivor + 1)]
    assert checkpointer.restore(survivor + 1, target)[1] == {"orchestrator": b"later"}


def test_the_manifest_is_readable_by_people(checkpointer):
    path = checkpointer.save(3, small_state(), PARTS)
    manifest = json.loads((path / "parts" / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["state"]["params.w"] == [[4, 3], "float32"]
    assert manifest["parts"]["orchestrator"]["bytes"] == len(PARTS["orchestrator"])
    assert isinstance(path, Path)
